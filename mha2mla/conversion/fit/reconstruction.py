"""Fitting one converted layer to what the source computes: gradient steps on calibration text, one layer at a time.

Output reconstruction is how post-training quantisation repairs a layer (AdaRound, arXiv 2004.10568; BRECQ, 2102.05426);
here it repairs a change of architecture. There are no labels, and no gradient crosses to another converted layer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch

from mha2mla.conversion.calibration.blocks import ActivationStore
from mha2mla.conversion.fit.repeatable import deterministic, tf32_on_cuda
from mha2mla.conversion.stages import Fit
from mha2mla.modeling.captured import CudaGraphs

Forward = Callable[[Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]
_Batch = tuple[int, torch.Tensor]  # length of the windows, and numbers of their blocks

_LEARNING_RATE = 0.006  # relative to the root mean square of each tensor; 0.003 and 0.03 lost more
_LARGEST_BIAS = 16.0  # times its weight, that a bias counts as; SmolLM2's reach 12, and no step helped keys' of 700
_NARROW = ("cuda",)  # where the products of a step are bfloat16
_BETAS = (0.9, 0.98)
_EPSILON = 1e-12  # the loss starts at one, but a gradient per weight is far below that
_WARM_UP = 0.05  # share of the steps
_CLIP = 2.0  # times the running average of the gradient's norm
_BASIS_SHARE = 1 / 64  # share of the steps: from as many batches the bases of the gradients are estimated from,
_BASIS_BATCHES = (8, 32)  # but at least and at most so many
_WIDEST_BASIS = 4096  # a wider side stays as it is: its eigenvectors cost more than they save
_HELD = ("inv_freq", "latent_centers")  # buffers
_CHECKS = 8  # times that the held-out loss is looked at
_HELD_OUT = 16  # one block of so many, at most so many blocks of a length


class ReconstructionError(ValueError):
    """A layer cannot be fitted: its loss is not a number before the first step."""


@dataclass(frozen=True)
class ReconstructionProblem:
    """Target of the fit of one layer.

    The loss of a batch is the mean over tokens of ``weights`` · mean_d (forward(tensors, inputs) − targets)².

    Attributes:
        inputs, targets: hidden states of the same blocks.
        weights: [blocks, size] float32, one over the energy that an error of a token is measured by.
        forward: tensors of the layer and inputs [n, length, hidden] -> [n, length, hidden], differentiable.
    """

    inputs: ActivationStore
    targets: ActivationStore
    weights: torch.Tensor
    forward: Forward
    device: torch.device


@dataclass(frozen=True)
class Reconstruction:
    """Result of a fit.

    Attributes:
        tensors: of the layer; those that were tuned are float32.
        loss_before, loss_after: on held-out windows; relative squared errors. The second is never larger.
        note: how the steps ran, and what went wrong.
    """

    tensors: dict[str, torch.Tensor]
    loss_before: float
    loss_after: float
    note: str


def reconstruct(
    problem: ReconstructionProblem, tensors: Mapping[str, torch.Tensor], fit: Fit, *, seed: int, layer: int
) -> Reconstruction:
    """Adam on the tensors of one layer (``fit.steps``, ``fit.tokens``), keeping the best by held-out blocks.

    A step sees windows of one length; lengths take turns by chance, each as often as it has blocks. A sixteenth of the
    blocks of each length is held out. Every tensor moves at a rate relative to its root mean square. On CUDA a step is
    one graph replay (a graph for each length); its products are bfloat16, which costs nothing that shows, others TF32.
    The result depends on the arguments and the machine only.

    Args:
        tensors: where to start, any floating-point dtype, on ``problem.device``.
        seed, layer: of the order of batches; the layer is named in messages.

    Raises:
        ReconstructionError: the start gives NaN or infinity.
    """
    with torch.inference_mode(False), torch.enable_grad(), _numerics(problem.device):
        return _Fit(problem, tensors, fit, seed, layer).run()


@contextmanager
def _numerics(device: torch.device) -> Iterator[None]:
    """Deterministic kernels, and on CUDA TF32; puts back what was set before."""
    with deterministic(warn_only=True), tf32_on_cuda(device), warnings.catch_warnings():
        # cuBLAS differs from run to run only with several streams and without a workspace setting; here is one.
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        yield


class _Fit:
    """The state of one fit. All tuned tensors are slices of one float32 vector, so that Adam is a few kernels."""

    def __init__(
        self, problem: ReconstructionProblem, tensors: Mapping[str, torch.Tensor], fit: Fit, seed: int, layer: int
    ) -> None:
        self.problem, self.start, self.layer = problem, dict(tensors), layer
        self.steps, self.seed = fit.steps, seed * 100_003 + layer
        device = problem.device
        self.names = [name for name in tensors if name not in _HELD]
        chosen = [tensors[name].detach().to(device, torch.float32) for name in self.names]
        self.vector = torch.cat([tensor.flatten() for tensor in chosen])
        self.rates = torch.cat([_rate(name, tensors).expand(tensors[name].numel()) for name in self.names]).to(device)
        self.sizes = [tensor.numel() for tensor in chosen]
        parts = zip(chosen, self.vector.split(self.sizes), strict=True)
        # Leaves that share the vector's memory: a step in it is seen by the next forward pass.
        self.leaves = [part.view(tensor.shape).detach().requires_grad_() for tensor, part in parts]
        self.constants = {
            name: tensor.detach().to(device, torch.float32) for name, tensor in tensors.items() if name in _HELD
        }
        self.bases: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [(None, None)] * len(chosen)
        self.first, self.second = torch.zeros_like(self.vector), torch.zeros_like(self.vector)
        self.count, self.norm, self.rate, self.skipped = (torch.zeros((), device=device) for _ in range(4))
        self.scale = 1.0
        self.blocks = problem.inputs.blocks
        self.held_out: dict[int, torch.Tensor] = {}
        self.train: dict[int, torch.Tensor] = {}
        for length in self.blocks.window_lengths:
            blocks = self.blocks.of_length(length)
            held = max(1, min(_HELD_OUT, len(blocks) // _HELD_OUT))
            self.held_out[length] = torch.arange(held) * len(blocks) // held + blocks.start
            left = sorted(set(blocks) - set(self.held_out[length].tolist()))
            self.train[length] = torch.tensor(left or [blocks.start])
        fewest = min(map(len, self.train.values()))
        self.batch = min(max(1, fit.tokens // self.blocks.size), fewest)
        self.weights = problem.weights.to(device)
        self.half = device.type in _NARROW

    def run(self) -> Reconstruction:
        before = self._held_out_loss()
        if not math.isfinite(before):
            raise ReconstructionError(f"layer {self.layer}: the loss before reconstruction is {before}")
        if before == 0:
            return Reconstruction(self.start, before, before, "exact before the first step")
        self.scale = 1 / before
        steps = self.steps
        order = self._order(steps)
        checks = {round(steps * (part + 1) / _CHECKS) for part in range(_CHECKS)}
        least, most = _BASIS_BATCHES
        self._choose_bases(order[: max(least, min(most, int(_BASIS_SHARE * steps)))])
        step_of, note = self._compile(order)
        best, kept = before, None
        rise = max(1, round(_WARM_UP * steps))
        for index in range(steps):
            length, blocks = order[index]
            self._fill(length, blocks)
            # A short linear rise, then a cosine to zero (arXiv 1608.03983).
            schedule = min(1.0, (index + 1) / rise) * 0.5 * (1 + math.cos(math.pi * index / steps))
            self.rate.fill_(schedule * _LEARNING_RATE)
            step_of[length]()
            if index + 1 in checks:
                loss = self._held_out_loss()
                if not math.isfinite(loss):
                    note += f"; diverged by step {index + 1}"
                    break
                if loss < best:
                    best, kept = loss, self.vector.clone()
        if skipped := int(self.skipped):
            note += f"; {skipped} steps without a finite gradient"
        if kept is None:
            return Reconstruction(self.start, before, before, note + "; no step helped")
        self.vector.copy_(kept)
        fitted = {name: leaf.detach().clone() for name, leaf in zip(self.names, self.leaves, strict=True)}
        return Reconstruction({**self.start, **fitted}, before, best, note)

    def _order(self, steps: int) -> list[_Batch]:
        """Length and blocks [batch] of every step: each block of a length once before any comes again."""
        generator = torch.Generator().manual_seed(self.seed)
        queues = {}
        for length, blocks in self.train.items():
            rounds = -(-steps * self.batch // len(blocks))
            shuffled = [blocks[torch.randperm(len(blocks), generator=generator)] for _ in range(rounds)]
            queues[length] = iter(torch.cat(shuffled)[: steps * self.batch].view(steps, -1).to(self.problem.device))
        lengths = torch.tensor([length for length, blocks in self.train.items() for _ in blocks])
        turns: list[int] = []
        while len(turns) < steps:
            turns += lengths[torch.randperm(len(lengths), generator=generator)].tolist()
        return [(length, next(queues[length])) for length in turns[:steps]]

    def _choose_bases(self, order: list[_Batch]) -> None:
        """The bases that Adam works in: eigenvectors of the gradients' second moments, on both sides of every matrix.

        SOAP (arXiv 2409.11321), which renews them all the time; those of the start serve a fit as short as this.
        """
        sums = [tuple(_square(size, leaf) for size in leaf.shape) for leaf in map(_matrix, self.leaves)]
        for length, blocks in order:
            loss = self._loss(*self._windows(length, blocks)) * self.scale
            for gradient, (left, right) in zip(torch.autograd.grad(loss, self.leaves), sums, strict=True):
                matrix = _matrix(gradient)
                if left is not None:
                    left.addmm_(matrix, matrix.T)
                if right is not None:
                    right.addmm_(matrix.T, matrix)
        self.bases = [tuple(_eigenvectors(side) for side in both) for both in sums]

    def _rotated(self, vector: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """All tensors in one vector, into their bases or back."""
        parts = []
        for part, leaf, (left, right) in zip(vector.split(self.sizes), self.leaves, self.bases, strict=True):
            matrix = part.view(_matrix(leaf).shape)
            if left is not None:
                matrix = (left if back else left.T) @ matrix
            if right is not None:
                matrix = matrix @ (right.T if back else right)
            parts.append(matrix.flatten())
        return torch.cat(parts)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tuned = {name: leaf.to(inputs.dtype) for name, leaf in zip(self.names, self.leaves, strict=True)}
        # Without a cache of casts: a captured graph would replay stale ones.
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            made = self.problem.forward({**self.constants, **tuned}, inputs)
        error = made.float() - targets.float()
        return (error.square().mean(-1) * weights).mean()

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.problem.device)
        for length, held in self.held_out.items():
            for blocks in held.split(self.batch):
                loss = self._loss(*self._windows(length, blocks.to(self.problem.device)))
                total += loss.double() * len(blocks)
        return float(total) / sum(map(len, self.held_out.values()))

    def _windows(self, length: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs, targets = (
            store.gather(blocks, self.problem.device, length) for store in (self.problem.inputs, self.problem.targets)
        )
        return inputs, targets, self.weights[blocks].view(-1, length)

    def _fill(self, length: int, blocks: torch.Tensor) -> None:
        """Puts a batch where the steps of its length look for it."""
        for buffer, values in zip(self.buffers[length], self._windows(length, blocks), strict=True):
            buffer.copy_(values)

    def _step(self, length: int) -> None:
        gradients = torch.autograd.grad(self._loss(*self.buffers[length]) * self.scale, self.leaves)
        with torch.no_grad():
            self._descend(torch.cat([gradient.flatten() for gradient in gradients]))

    def _descend(self, gradient: torch.Tensor) -> None:
        """Adam (arXiv 1412.6980) without a host decision; the gradient is clipped at its own usual norm."""
        norm = torch.linalg.vector_norm(gradient)
        finite = norm.isfinite()
        self.skipped += ~finite
        usual = torch.where(self.norm > 0, self.norm, norm)
        clip = (_CLIP * usual / norm.clamp_min(1e-30)).clamp_max(1)
        gradient = self._rotated(torch.where(finite, gradient * clip, 0))
        self.norm.copy_(torch.where(finite, usual.lerp(norm * clip, 0.05), self.norm))
        self.count += 1
        self.first.lerp_(gradient, 1 - _BETAS[0])
        self.second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        unbiased = (self.second / (1 - _BETAS[1] ** self.count)).sqrt_().add_(_EPSILON)
        step = (self.first / (1 - _BETAS[0] ** self.count)) / unbiased
        self.vector.sub_(self._rotated(step, back=True).mul_(self.rates).mul_(self.rate))

    def _compile(self, order: list[_Batch]) -> tuple[dict[int, Callable[[], None]], str]:
        """One step at each length as a call without arguments over static buffers, and how they run."""
        self.buffers = {length: self._windows(length, blocks) for length, blocks in dict(order).items()}
        steps = {length: partial(self._step, length) for length in self.buffers}
        if self.problem.device.type != "cuda":
            return steps, "eager"
        state = (self.vector, self.first, self.second, self.count, self.norm, self.skipped)
        saved = [tensor.clone() for tensor in state]
        recorder, device = CudaGraphs(), self.problem.device
        try:
            # Small layers are bound by launches: capture forward, backward and Adam at once.
            steps = {length: recorder.record(step, lambda: None, device)[1] for length, step in steps.items()}
            note = "CUDA graph"
        except RuntimeError as error:
            torch.cuda.synchronize()
            note = f"eager, since capture failed: {str(error).splitlines()[0]}"
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        return steps, note


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [m, n]; a vector is a row."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def _square(size: int, like: torch.Tensor) -> torch.Tensor | None:
    """Room for the second moments of a side; None where a basis is no use, or too dear."""
    return torch.zeros(size, size, device=like.device) if like.shape[0] > 1 and size <= _WIDEST_BASIS else None


def _eigenvectors(moments: torch.Tensor | None) -> torch.Tensor | None:
    if moments is None or not torch.isfinite(moments).all():
        return None
    for dtype in (torch.float32, torch.float64):  # LAPACK's float32 fails on some matrices of very different scales
        with suppress(torch.linalg.LinAlgError):
            return torch.linalg.eigh(moments.to(dtype))[1].float()
    return None


def _rate(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[1], what a learning rate of one means for a tensor: its root mean square; for a bias within bounds that its
    weight's gives, since it may be zero, or hundreds of times what a step should change."""
    scale = _root_mean_square(tensors[name])
    if name.endswith(".bias"):
        weight = _root_mean_square(tensors[name.removesuffix("bias") + "weight"])
        scale = scale.clamp(weight, _LARGEST_BIAS * weight)
    return scale.float().view(1)


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().square().mean().sqrt()
