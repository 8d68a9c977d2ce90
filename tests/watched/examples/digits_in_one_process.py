"""An example as torch has them for one device: a convnet with dropout, a loss summed up in its
test, a schedule for each epoch, weights saved at the end."""

import os

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def train(model, loader, optimizer, epoch):
    model.train()
    for index, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if index % 4 == 0:
            print(f"Train Epoch: {epoch} [{index * len(data)}]\tLoss: {loss.item():.6f}")


def test(model, loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1, keepdim=True).eq(target.view_as(target)).sum().item()
    test_loss /= len(loader.dataset)
    print(f"Test set: Average loss: {test_loss:.4f}, Accuracy: {correct}/{len(loader.dataset)}")


def main():
    torch.manual_seed(1)
    images, labels = torch.randn(90, 1, 8, 8), torch.randint(0, 10, (90,))
    train_loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[:50], labels[:50]), batch_size=32, shuffle=True)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 4):
        train(model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), os.path.join(os.environ["SAVED_IN"], "cnn.pt"))


if __name__ == "__main__":
    main()
