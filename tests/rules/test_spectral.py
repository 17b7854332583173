"""Fourier transforms and complex numbers against plain torch, on cut, uneven, empty and Partial pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.rules.sweep import placements_of, spread, sweep

Function = Callable[..., Any]


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _z(*shape: int) -> torch.Tensor:
    return torch.view_as_complex(_x(*shape, 2))


TRANSFORMS: dict[str, tuple[Function, torch.Tensor]] = {
    "fft": (torch.fft.fft, _z(5, 3)),
    "fft of reals": (lambda x: torch.fft.fft(x, dim=0), _x(5, 3)),
    "longer fft": (lambda x: torch.fft.fft(x, n=8, norm="ortho"), _x(5, 3)),
    "ifft": (lambda x: torch.fft.ifft(x, dim=1), _z(3, 5, 2)),
    "rfft": (torch.fft.rfft, _x(5, 7)),
    "irfft": (lambda x: torch.fft.irfft(x, n=7, dim=0), _z(4, 3)),
    "hfft": (torch.fft.hfft, _z(5, 3)),
    "ihfft": (torch.fft.ihfft, _x(5, 7)),
    "fft2": (lambda x: torch.fft.fft2(x, dim=(0, 2)), _z(5, 3, 2)),
    "rfft2": (torch.fft.rfft2, _x(5, 3, 4)),
    "irfft2": (torch.fft.irfft2, _z(3, 5, 3)),
    "fftn": (torch.fft.fftn, _z(5, 3)),
    "ihfftn": (lambda x: torch.fft.ihfftn(x, dim=(1, 2)), _x(5, 3, 4)),
    "hfftn": (lambda x: torch.fft.hfftn(x, dim=(0, 1)), _z(5, 3, 2)),
    "fftshift": (torch.fft.fftshift, _x(5, 4)),
    "stft": (lambda x: torch.stft(x, 8, hop_length=3, return_complex=True, window=None), _x(3, 20)),
    "stft of one": (lambda x: torch.stft(x, 8, center=False, return_complex=True), _x(20)),
    "istft": (lambda x: torch.istft(x, 8, window=torch.ones(8, device=x.device)), _z(3, 5, 6)),
    "conj": (lambda z: z.conj() * 2, _z(5, 3)),
    "conj and transform": (lambda z: torch.fft.fft(z.conj()), _z(5, 3)),
    "resolve_conj": (lambda z: z.conj().resolve_conj(), _z(5, 3)),
    "imag of conj": (lambda z: z.conj().imag, _z(5, 3)),
    "adjoint": (lambda z: z.mH @ z, _z(3, 5, 2)),
    "view_as_real": (torch.view_as_real, _z(5, 3)),
    "view_as_complex": (lambda x: torch.view_as_complex(x.reshape(5, 3, 2)), _x(5, 6)),
    "complex": (lambda x: torch.complex(x, x + 1), _x(5, 3)),
    "polar": (lambda x: torch.polar(x.abs(), x), _x(5, 3)),
    "angle": (torch.angle, _z(5, 3)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_values(name: str) -> None:
    run, value = TRANSFORMS[name]
    sweep(run, value, exact=False, partial=name not in ("polar",))


def test_other_dimensions_stay_cut() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = spread(_x(5, 3, 4), mesh, [Shard(1)])
    assert placements_of(torch.fft.rfft(x)) == [Shard(1)]
    assert placements_of(torch.fft.fft2(x, dim=(0, 2))) == [Shard(1)]
    assert placements_of(torch.fft.fft2(x)) == [Replicate()]
    assert placements_of(torch.fft.irfft(torch.fft.rfft(x), n=4)) == [Shard(1)]
    assert placements_of(torch.fft.fft(spread(_x(5, 3), mesh, [Partial()]))) == [Partial()]
    assert placements_of(torch.stft(spread(_x(4, 20), mesh, [Shard(0)]), 8, return_complex=True)) == [Shard(0)]


@pytest.mark.parametrize("name", ["fft of reals", "rfft2", "ihfft", "stft", "longer fft"])
def test_gradients(name: str) -> None:
    run, value = TRANSFORMS[name]

    def gradient(x: torch.Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        run(leaf).abs().square().sum().backward()
        return leaf.grad

    sweep(gradient, value, exact=False, partial=False, meshes=((2,), (2, 2)))
