"""A language model as torch's examples have it: no loader, hidden states carried over, clipping, a
rate that is annealed by hand, the best model saved, the loss by tokens."""

import math
import os

import torch
from torch import nn

BPTT, WORDS = 7, 20


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(WORDS, 12)
        self.rnn, self.decoder = nn.LSTM(12, 12, 2, dropout=0.2), nn.Linear(12, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, WORDS)
        return nn.functional.log_softmax(decoded, dim=1), hidden


def batchify(words, size):
    return words.narrow(0, 0, len(words) // size * size).view(size, -1).t().contiguous()


def batch_at(source, i):
    length = min(BPTT, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


def fresh(size):
    return torch.zeros(2, size, 12), torch.zeros(2, size, 12)


def evaluate(model, criterion, source):
    model.eval()
    total, hidden = 0.0, fresh(source.shape[1])
    with torch.no_grad():
        for i in range(0, len(source) - 1, BPTT):
            data, targets = batch_at(source, i)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


def train(model, criterion, source, rate):
    model.train()
    hidden = fresh(source.shape[1])
    for i in range(0, len(source) - 1, BPTT):
        data, targets = batch_at(source, i)
        model.zero_grad()
        hidden = tuple(state.detach() for state in hidden)
        output, hidden = model(data, hidden)
        criterion(output, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-rate)


torch.manual_seed(1111)
text = torch.randint(0, WORDS, (400,))
train_data, val_data = batchify(text[:300], 4), batchify(text[300:], 4)
net, loss, lr, best = RNN(), nn.NLLLoss(), 2.0, None
for epoch in range(1, 4):
    train(net, loss, train_data, lr)
    val_loss = evaluate(net, loss, val_data)
    print(f"| end of epoch {epoch} | valid loss {val_loss:5.2f} | ppl {math.exp(val_loss):8.2f}")
    if best is None or val_loss < best:
        with open(os.path.join(os.environ["SAVED_IN"], "model.pt"), "wb") as f:
            torch.save(net, f)
        best = val_loss
    else:
        lr /= 4.0
