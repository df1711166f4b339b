"""Lightning's Trainer: forward and backward as graphs, or the whole step as one."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import thunder
import torch
from support import replays, same, same_state
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from thunder_cg import cudagraph_transform, graphed_step

L = pytest.importorskip("lightning")
plugins = pytest.importorskip("lightning.pytorch.plugins")
pytestmark = pytest.mark.filterwarnings("ignore")


class Automatic(L.LightningModule):
    def __init__(self, net, transforms):
        super().__init__()
        self.net = thunder.jit(net, transforms=transforms)  # the only line to change, without checkpoints

    def state_dict(self, *args, **kwargs):
        """For checkpoints: Thunder 0.2.6 does not load what it saves of a compiled module inside of another module."""
        return self.net.state_dict()

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return self.net.load_state_dict(state_dict, strict, assign)

    def training_step(self, batch, index):
        loss = self.net(*batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.net(*batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


def fused(module):
    """An optimizer that a graph can hold, and a schedule of its learning rate."""
    on_gpu = module.device.type == "cuda"
    optimizer = torch.optim.AdamW(module.net.parameters(), lr=0.01, fused=True, capturable=on_gpu)
    return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


class Whole(Automatic):
    """Automatic optimization, with the whole step as one graph. Lightning's own backward and step do nothing."""

    max_norm = 0.5

    def __init__(self, net, transforms, graphed):
        super().__init__(net, transforms)
        self.graphed = graphed

    def configure_optimizers(self):
        (optimizer,), schedules = fused(self)

        def update(x, labels):
            loss = self.net(x, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        self.update = self.graphed(update)
        return [optimizer], schedules

    def training_step(self, batch, index):
        loss = self.update(*batch)
        self.log("loss", loss)
        return loss.requires_grad_()


class Manual(Whole):
    """The whole step is one graph. It leaves no gradients, so Lightning's own step changes nothing, and counts it."""

    max_norm = 1.0

    def __init__(self, net, transforms, graphed):
        super().__init__(net, transforms, graphed)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.log("loss", self.update(*batch))
        self.optimizers().step()

    def on_train_epoch_end(self):
        self.lr_schedulers().step()


class Stepped(plugins.MixedPrecision):
    """`update` has made the optimizer's step, with the plugin's scaler, which is in checkpoints."""

    def optimizer_step(self, optimizer, model, closure, **options):
        return closure()


class ManualScaled(Manual):
    """The whole step is one graph, the scaler's part included."""

    def configure_optimizers(self):
        (optimizer,), schedules = fused(self)
        scaler = self.trainer.precision_plugin.scaler

        def update(x, labels):
            loss = self.net(x, labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        self.update = self.graphed(update)
        return [optimizer], schedules


class ManualInPython(Automatic):
    """Lightning scales, clips and steps; forward and backward are graphs."""

    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        loss = self.net(*batch)
        self.log("loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()


class WithItsOptimizer(Automatic):
    """Lightning's optimizer counts each step in Python, so a step that uses it is no graph."""

    automatic_optimization = False

    def __init__(self, net, transforms, graphed):
        super().__init__(net, transforms)
        self.update = graphed(self.take_step)

    def take_step(self, x, labels):
        optimizer = self.optimizers()
        loss = self.net(x, labels)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def training_step(self, batch, index):
        self.log("loss", self.update(*batch))


def fit(module, data, device, folder, epochs=4, checkpoint=None, **options):
    """Trains, and returns what Lightning has logged and counted, and the last checkpoint."""
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(
        module, DataLoader(data, 4, shuffle=True), DataLoader(data, 7), ckpt_path=checkpoint, weights_only=False
    )
    saved = trainer.checkpoint_callback.best_model_path
    assert trainer.global_step == 6 * epochs and f"epoch={epochs - 1}-step={6 * epochs}" in saved
    return {name: value.item() for name, value in trainer.callback_metrics.items()}, saved


def test_automatic_optimization(net, data, backend, device, tmp_path):
    plain = Automatic(copy.deepcopy(net), [])
    captured = Automatic(net, [cudagraph_transform(backend=backend)])
    expected, _ = fit(plain, data, device, tmp_path)
    found, _ = fit(captured, data, device, tmp_path)
    same(found, expected)
    same_state(captured, plain)
    assert replays(captured.net) > 40


def test_automatic_optimization_with_the_whole_step(net, data, backend, device, tmp_path):
    """Beside what Lightning does by itself, its clipping, its schedule and its checkpoints included."""
    plain = Automatic(copy.deepcopy(net), [])
    plain.configure_optimizers = lambda: fused(plain)
    transforms = [cudagraph_transform(backend=backend)]
    whole = Whole(net, transforms, lambda update: graphed_step(update, backend=backend))
    checkpoint = None
    for epochs in (4, 6):
        expected, saved = fit(plain, data, device, tmp_path, epochs, checkpoint, gradient_clip_val=0.5)
        found, checkpoint = fit(whole, data, device, tmp_path, epochs, checkpoint)
        same(found, expected)
        plain.zero_grad()
        same_state(whole, plain)
        states = [torch.load(path, weights_only=False)["optimizer_states"] for path in (checkpoint, saved)]
        same(*states)
        assert whole.update.replays >= (12 if epochs == 4 else 4), whole.update.in_python


def test_manual_optimization(net, data, backend, device, tmp_path):
    plain = Manual(copy.deepcopy(net), [], lambda update: update)
    transforms = [cudagraph_transform(backend=backend)]
    graphed = Manual(net, transforms, lambda update: graphed_step(update, backend=backend))
    expected, checkpoint = fit(plain, data, device, tmp_path)
    found, _ = fit(graphed, data, device, tmp_path)
    same(found, expected)
    same_state(graphed, plain)
    assert graphed.update.replays >= 12, graphed.update.in_python

    for each in (plain, graphed):  # goes back to the checkpoint, and trains on from there
        fit(each, data, device, tmp_path, epochs=6, checkpoint=checkpoint)
    same_state(graphed, plain)
    assert graphed.update.replays >= 4, graphed.update.in_python


def test_its_optimizer_in_a_step(net, data, backend, device, tmp_path):
    plain = WithItsOptimizer(copy.deepcopy(net), [], lambda update: update)
    transforms = [cudagraph_transform(backend=backend)]
    graphed = WithItsOptimizer(net, transforms, lambda update: graphed_step(update, backend=backend))
    expected, _ = fit(plain, data, device, tmp_path, epochs=2)
    found, _ = fit(graphed, data, device, tmp_path, epochs=2)
    same(found, expected)
    same_state(graphed, plain)
    fix = "take optimizers(use_pl_optimizer=False) in the step"  # as `Manual` does
    reasons = str([*graphed.update.in_python])
    if device == "cuda" and "levels below" in reasons:  # what leads to the loader's data there comes first
        fix = "have the step name what it needs"
    assert graphed.update.replays == 0 and fix in reasons and "do that outside" not in reasons, reasons


@pytest.mark.parametrize("kind", [Automatic, ManualInPython, ManualScaled])
def test_half_precision(kind, net, data, backend, device, tmp_path):
    """``precision="16-mixed"``, whose plugin works on a CPU, too. The first steps overflow, and so do later ones."""

    def train(module):
        scaler = torch.amp.GradScaler(device, init_scale=2.0**18, growth_interval=4)
        plugin = (Stepped if kind is ManualScaled else plugins.MixedPrecision)("16-mixed", device, scaler)
        return fit(module, data, device, tmp_path, plugins=[plugin])[0], scaler.state_dict()

    transforms = [cudagraph_transform(backend=backend)]
    if kind is ManualScaled:
        plain = kind(copy.deepcopy(net), [], lambda update: update)
        graphed = kind(net, transforms, lambda update: graphed_step(update, backend=backend))
    else:
        plain, graphed = kind(copy.deepcopy(net), []), kind(net, transforms)
    expected, found = train(plain), train(graphed)
    same(found, expected)
    same_state(graphed, plain)
    assert found[1]["scale"] < 2.0**18
    assert replays(graphed.net) > (0 if kind is ManualScaled else 40)
    assert kind is not ManualScaled or graphed.update.replays >= 12, graphed.update.in_python


def test_bfloat16(net, data, backend, device, tmp_path):
    plain = Manual(copy.deepcopy(net), [], lambda update: update)
    transforms = [cudagraph_transform(backend=backend)]
    graphed = Manual(net, transforms, lambda update: graphed_step(update, backend=backend))
    found, expected = (fit(each, data, device, tmp_path, precision="bf16-mixed")[0] for each in (graphed, plain))
    same(found, expected)
    same_state(graphed, plain)
    assert graphed.update.replays >= 12, graphed.update.in_python


def test_the_recipes_of_the_documents(capsys):
    root = Path(__file__).parents[2]
    texts = [(root / name).read_text(encoding="utf-8") for name in ("README.md", "thunder_cg/STEPS.md")]
    blocks = re.findall(r"^```py\n(.*?)^```$", "".join(texts), re.MULTILINE | re.DOTALL)
    recipe, methods = (
        each for start in ("import lightning", "def configure_") for each in blocks if each.startswith(start)
    )
    names = {"__name__": "recipe", "graphed_step": graphed_step}
    exec(recipe, names)
    assert "6 of 8 calls and 6 of 8 backwards replayed" in capsys.readouterr().out
    exec(methods, names)
    kind = type("Whole", (names["Model"],), {name: names[name] for name in ("configure_optimizers", "training_step")})
    L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False).fit(model := kind(), names["loader"])
    assert model.update.calls == 8 and model.update.replays == 5, model.update.in_python
