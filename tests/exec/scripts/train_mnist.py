"""Trains a small convolutional network on pictures of digits (drawn here, so that nothing is downloaded)."""

# ruff: noqa: PLW2901  # the usual form moves a batch to the device under its own name

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 7 * 7, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count, seed):
    """Pictures (count, 1, 28, 28) with one bright row and column for each of the ten labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.randn(count, 1, 28, 28, generator=generator) * 0.3
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 2 * label + 4] += 1
        image[0, :, 2 * label + 4] += 1
    return TensorDataset(images, labels)


def train(args, model, device, loader, optimizer, scaler, epoch):
    model.train()
    for step, (data, target) in enumerate(loader):
        data = data.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            loss = F.nll_loss(model(data), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % args.log_interval == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.8f} scale {scaler.get_scale():g}")


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    loss, correct = 0.0, 0
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        output = model(data)
        loss += F.nll_loss(output, target, reduction="sum").item()
        prediction = output.argmax(dim=1, keepdim=True)
        correct += prediction.eq(target.view_as(prediction)).sum().item()
    count = len(loader.dataset)
    print(f"test loss {loss / count:.8f} accuracy {correct}/{count}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--log-interval", type=int, default=2)
    parser.add_argument("--save-model", default=None)
    args = parser.parse_args()

    torch.manual_seed(1)
    device = torch.device("cuda")
    if torch.cuda.is_available():
        torch.backends.cudnn.benchmark = True
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()

    loading = {"num_workers": 1, "pin_memory": True, "batch_size": args.batch_size}
    shuffling = torch.Generator().manual_seed(2)
    train_loader = DataLoader(digits(256, seed=3), shuffle=True, generator=shuffling, **loading)
    test_loader = DataLoader(digits(64, seed=4), **loading)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, scaler, epoch)
        test(model, device, test_loader)
        scheduler.step()

    if torch.cuda.is_available():
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) > 0
        assert torch.cuda.max_memory_allocated() >= 0
    if args.save_model:
        torch.save(model.state_dict(), args.save_model)
        again = Net()
        again.load_state_dict(torch.load(args.save_model, map_location="cpu"))
        print("saved", sum(p.double().sum().item() for p in again.parameters()))
        again.to(device).load_state_dict(torch.load(args.save_model, map_location=device))
        test(again, device, test_loader)


if __name__ == "__main__":
    main()
