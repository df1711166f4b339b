"""The Trainer of Transformers: with a compiled forward, and with the whole step as one graph."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from support import replays, same, same_state

from thunder_cg import cudagraph_transform, graphed_step, thunderfx
from thunder_cg.dynamo.compiler import compile_with

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")


class Graphed(transformers.Trainer):
    """The whole step is one graph. It leaves no gradients, so the Trainer's own step changes nothing, and counts it."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        return self.update(**self._prepare_inputs(inputs))


class Samples(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def trainer(model, data, device, folder, kind=transformers.Trainer, optimizer=None, **options):
    torch.manual_seed(1)
    arguments = transformers.TrainingArguments(
        folder,
        num_train_epochs=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=7,
        learning_rate=0.01,
        save_strategy="no",
        report_to=[],
        use_cpu=device == "cpu",
        disable_tqdm=True,
        logging_steps=1,
        **options,
    )
    data = Samples(data)
    return kind(model=model, args=arguments, train_dataset=data, eval_dataset=data, optimizers=(optimizer, None))


def train(trainer):
    """Losses and learning rates of all steps and evaluations."""
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps
    kept = ("loss", "eval_loss", "learning_rate", "grad_norm", "step")
    return [{name: value for name, value in row.items() if name in kept} for row in trainer.state.log_history]


def test_the_whole_step(net, data, backend, device, tmp_path):
    rows = [{"x": x, "labels": y} for x, y in data]

    def run(model, graphed):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=device == "cuda")

        def update(x, labels):
            loss = model(x, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        options = {
            "remove_unused_columns": False,
            "label_names": ["labels"],
            "max_grad_norm": 0.0,
            "eval_strategy": "epoch",
        }
        loop = trainer(model, rows, device, tmp_path, Graphed, optimizer, **options)
        loop.update = graphed(update)
        return train(loop), loop.update

    class WithLoss(torch.nn.Module):
        """As the Trainer wants an evaluation: the loss first."""

        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x, labels):
            loss = self.net(x, labels)
            return loss if self.training else (loss, x)

    plain, whole = WithLoss(copy.deepcopy(net)), WithLoss(net)
    plain.net = thunder.jit(plain.net)
    whole.net = thunder.jit(whole.net, transforms=[cudagraph_transform(backend=backend)])
    expected, _ = run(plain, lambda update: update)
    found, update = run(whole, lambda update: graphed_step(update, backend=backend))
    same(found, expected)
    same_state(whole, plain)
    assert update.calls == 18 and update.replays >= 9, update.in_python


def test_a_language_model_with_a_compiled_forward(backend, device, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    plain = transformers.LlamaForCausalLM(config).to(device)
    captured = copy.deepcopy(plain)
    plain.forward = compile_with(plain.forward)
    captured.forward = thunderfx(captured.forward, backend=backend)  # the only line to add
    tokens = [{"input_ids": t, "labels": t} for t in torch.randint(32, (12, 8))]
    expected = train(trainer(plain, tokens, device, tmp_path))
    same(train(trainer(captured, tokens, device, tmp_path)), expected)
    same_state(captured, plain)
    assert replays(captured.forward) > 12


def test_a_model_that_chooses_its_mask_by_values(backend, device):
    """A step of a model that nobody compiles. What a warning of Transformers says is followed."""
    settings = transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False)
    mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril().expand(2, 1, 6, 6)

    def run(graphed, **inputs):
        torch.manual_seed(1)
        model = transformers.GPT2LMHeadModel(settings).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=device == "cuda")

        def update(tokens):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens, **inputs).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = graphed_step(update, backend=backend) if graphed else update
        losses = [step(torch.randint(0, 31, (2, 6)).to(device)) for _ in range(7)]
        return [*losses, *model.parameters()], step

    for inputs in ({}, {"attention_mask": mask}):
        expected, _ = run(False, **inputs)
        found, step = run(True, **inputs)
        same(found, expected)
        if inputs:
            assert step.replays >= 3, step.in_python
        else:
            assert step.replays == 0 and "pass attention_mask with 4 dimensions" in str([*step.in_python])
