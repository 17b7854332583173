"""The format of ``torch.distributed.checkpoint``, by its own functions, in this process.

Its index is a pickle and so are its values that are no tensors. The index is read by an unpickler that knows the classes
of an index and no others; values as ``torch.load(weights_only=True)`` reads them.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from typing import Any

import torch

from dtorch.client.checkpoint.directory import Staging
from dtorch.client.checkpoint.tree import Weights, children, decode
from dtorch.client.tensor import DTensor
from dtorch.client.wrap import to_host
from dtorch.core.errors import LoadError
from dtorch.core.torch_private import CHECKPOINT_INDEX


class Writing:
    """A checkpoint in this format. The manifest beside it says what its values were.

    Args:
        weights: the tensors of the state.
        tree: the rest.
    """

    def __init__(self, weights: list[Weights], tree: Any) -> None:
        nodes = {id(node): w.tensors[name] for w in weights for name, node in w.nodes.items()}
        self._flat: dict[str, Any] = {}
        self._tree = tree
        self._flatten(tree, (), nodes)
        self._staging: Staging | None = None

    def begin(self, directory: str) -> None:
        """Fetch the values.

        Raises:
            OSError, DtorchError: there is no room, or a value was never made.
        """
        self._staging = Staging(directory)
        try:
            for key, value in self._flat.items():
                if isinstance(value, DTensor):
                    self._flat[key] = to_host(value)
        except BaseException:
            self._staging.abandon()
            raise

    def finish(self) -> None:
        """Write them and put the checkpoint in its place.

        Raises:
            OSError: that fails; nothing is left.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        assert self._staging is not None, "it has begun"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is")  # that there is one process is meant
                # Nothing is copied ahead from the devices that it takes dtorch's for: all values are here.
                writer = FileSystemWriter(self._staging.path, per_thread_copy_ahead=0)
                save(self._flat, storage_writer=writer, no_dist=True)
            self._staging.commit({"state": self._tree})
        except CheckpointException as e:  # around what its threads have met
            raise OSError("; ".join(str(cause) for cause, _ in e.failures.values())) from e
        finally:
            self._staging.abandon()

    def _flatten(self, node: Any, path: tuple[Any, ...], tensors: dict[int, torch.Tensor]) -> None:
        """Name every tensor, and every other value, by its path, as that library flattens dicts."""
        kind = node.get("$") if isinstance(node, dict) else None
        key = ".".join(map(str, path)) or "value"
        if kind == "tensor":
            while key in self._flat:
                key += "#"
            self._flat[key], node["key"] = tensors[id(node)], key
        elif kind in ("object", "generator", "array", "number"):
            self._flatten(node["of"], path, tensors)
        elif (isinstance(node, dict) and kind in (None, "dict", "tuple")) or isinstance(node, list):
            for name, below in children(node).items():
                self._flatten(below, (*path, name), tensors)
        else:
            self._flat.setdefault(key, decode(node, _no_tensor))


def read(directory: str, tree: Any = None) -> Any:
    """The tree of a checkpoint with its tensors in it, on the host.

    Args:
        directory: of the checkpoint.
        tree: what the manifest says; without, dicts and lists as that library has flattened them.

    Raises:
        LoadError: it is damaged, or holds objects that could run code when they are read.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import ReadItem
    from torch.distributed.checkpoint.state_dict_loader import load

    index = _read_index(os.path.join(directory, ".metadata"))

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return index  # type: ignore[no-any-return]

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    flat: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in index.state_dict_metadata.items()
        if tree is None or isinstance(entry, TensorStorageMetadata)
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)  # so `flat` itself is filled
            load(flat, storage_reader=Reader(directory), planner=planner, no_dist=True)
    except CheckpointException as e:
        causes = "; ".join(str(cause) for cause, _ in e.failures.values())
        raise LoadError(f"{directory} cannot be read as a checkpoint of torch.distributed: {causes}") from e
    if tree is not None:
        _fill(tree, flat, directory)
        return tree
    nested: dict[Any, Any] = {}
    for key, value in flat.items():
        _place(nested, (index.planner_data or {}).get(key, (key,)), _leaf(value))
    return _sequences(nested, ())


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"$": "tensor", "value": value}
    return value if isinstance(value, list) else {"$": "value", "of": value}  # an optimizer's groups are a list


def _place(tree: dict[Any, Any], path: tuple[Any, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _sequences(tree: Any, path: tuple[Any, ...]) -> Any:
    """Dicts and lists in place of dicts; an optimizer's states are numbered again, whose numbers have become text."""
    if not isinstance(tree, dict) or "$" in tree:
        return tree
    found = {key: _sequences(value, (*path, key)) for key, value in tree.items()}
    if all(isinstance(key, int) for key in found):
        return [found[key] for key in sorted(found)]
    numbered = path[-1:] == ("state",) and all(str(key).isdecimal() for key in found)
    return {"$": "dict", "of": [[int(key) if numbered else key, value] for key, value in found.items()]}


def _fill(node: Any, flat: dict[str, Any], directory: str) -> None:
    """Put the tensors into their nodes."""
    if isinstance(node, dict) and node.get("$") == "tensor":
        if node.get("key") not in flat:
            raise LoadError(f"{directory} has no tensor {node.get('key')!r}, which its manifest names.")
        node["value"] = flat[node["key"]]
    elif isinstance(node, (dict, list)):
        for below in node.values() if isinstance(node, dict) else node:
            _fill(below, flat, directory)


class _Index(pickle.Unpickler):
    """Makes an index, and nothing that is not part of one."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in CHECKPOINT_INDEX:
            return super().find_class(module, name)
        raise LoadError(f"the index of the checkpoint names {module}.{name}, which no index holds; it is not read.")


def _read_index(path: str) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    try:
        with open(path, "rb") as file:
            found = _Index(file).load()
    except LoadError:
        raise
    except Exception as e:  # of a damaged pickle it can be any
        raise LoadError(f"{path} is no index of a checkpoint: {e!r}.") from e
    if not isinstance(found, Metadata):
        raise LoadError(f"{path} is no index of a checkpoint, but a {type(found).__name__}.")
    if getattr(found, "storage_meta", None) is None:
        found.storage_meta = StorageMeta()
    for place in (found.storage_data or {}).values():
        if os.path.basename(place.relative_path) != place.relative_path:
            raise LoadError(f"{path} names a file outside of the checkpoint: {place.relative_path!r}.")
    return found


def _no_tensor(node: dict[str, Any], path: tuple[Any, ...]) -> torch.Tensor:
    raise LoadError("a tensor in the place of a plain value.")
