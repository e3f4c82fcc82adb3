"""The passes of an estimate over some of its inputs.

They make the inputs, their cotangents, and the norms.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import InputError, warn
from fastlr.estimator.eval_mode import eval_mode
from fastlr.estimator.identity import of_predictive
from fastlr.estimator.options import EstimateOptions
from fastlr.estimator.padding import padding_mask
from fastlr.estimator.predictive import Bernoulli, Categorical, Predictive
from fastlr.estimator.whole_batch import gradient_of_batch, refuse_mixed_gradients
from fastlr.ghost.api import engine_of
from fastlr.ghost.engine import ChunkNorms
from fastlr.ghost.model.batch import along, copied
from fastlr.ghost.model.refusals import refusals
from fastlr.ghost.model.view import ModelView
from fastlr.ghost.norms.cotangents import Scaled
from fastlr.ghost.report import shared_inputs
from fastlr.ghost.trust.audits import Draw
from fastlr.ops.autocast import full_precision, in_autocast_region
from fastlr.ops.cudnn import without_cudnn
from fastlr.ops.deferred_checks import refuse_where
from fastlr.ops.torch_private import tree_leaves, tree_map

_LAYERS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution")  # nodes of linear layers
TOKENS = (torch.int32, torch.int64)
VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "ToCopy")  # nodes


class Passes:
    """Measures samples start .. stop - 1 of the inputs.

    Args:
        options: what is measured and how.
        view: the model.

    Attributes:
        dtype: Dtype of the floating-point inputs: the model's when the measurement began.
        engine: Engine of the model, which others use too.
        predictive: the distribution of the labels; where none was given the default, once an output
            was seen.
        axes: Number of axes of the output, once one was seen.
        padding_left_out: True if the last chunk had padding.
        may_be_probabilities: True if the outputs of the first chunk lie between 0 and 1, and vary.
        refusals_checked: True once a batch was seen to be one that the per-sample probes measure
            (for ``probe="batch"``).
    """

    def __init__(self, options: EstimateOptions, view: ModelView) -> None:
        self.options, self.view = options, view
        self.engine = engine_of(view)
        self.dtype = torch.float32
        self.renew()
        self.predictive: Any = options.predictive
        self.axes: int | None = None
        self.padding_left_out = self.may_be_probabilities = False

    def renew(self) -> None:
        """Begin a measurement: the model may have another precision since the one before."""
        trained = (
            p for p in self.view.module.parameters() if p.requires_grad and p.is_floating_point()
        )
        self.dtype = next((p.dtype for p in trained), torch.float32)
        self.refusals_checked = False

    def inputs(self, start: int, stop: int) -> Any:
        """Return these inputs on the model's device, with the samples along its axis."""
        options, device = self.options, self.view.device
        x = options.inputs.batch(start, stop, seed=options.seed, device=device, dtype=self.dtype)
        if options.in_dim == options.inputs_in_dim:
            return x
        return tree_map(lambda t: _move_samples(t, options.in_dim, stop - start), x)

    def inputs_on_device(self, n: int) -> Callable[[Tensor], Any] | None:
        """Return the function that makes ``n`` inputs on the device, where the inputs have one.

        Its argument is the number of the first, [1] int64.
        """
        options = self.options
        if options.in_dim != options.inputs_in_dim or not hasattr(options.inputs, "from_device"):
            return None
        return options.inputs.from_device(
            n, seed=options.seed, device=self.view.device, dtype=self.dtype
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context of the precision asked for, whatever autocast region the caller is in.

        Within a region of the caller no cast weights are cached. They would be stale after an
        optimizer step, and a CUDA graph would keep them. A chunk has a context of its own, with
        which its cache ends.
        """
        device, dtype = self.view.device, self.options.dtype
        if dtype is None:
            return full_precision(device)
        return torch.autocast(device.type, dtype=dtype, cache_enabled=not in_autocast_region())

    def forward(self, x: Any) -> Tensor:
        """Return the model's output for copies of the inputs, with its graph."""
        parameters = self.view.parameters.values()
        native = without_cudnn(self.view.device, parameters, compared=False)
        with self.autocast(), native, refusals(self.view, x):
            return self.view.forward(copied(x))

    def cotangent(
        self, index: range | Tensor, x: Any, probe: str | None = None, *, scaled: bool = True
    ) -> Callable[[Tensor], Any]:
        """Return the function of the output that gives the cotangents of the inputs x.

        ``index`` holds the global numbers of these inputs.
        """
        out_dim, seed, probe = self.options.out_dim, self.options.seed, probe or self.options.probe

        def cotangent(output: Tensor) -> Any:
            self._require_rows(output, x, len(index))
            if self.predictive is None:
                self.predictive = default_predictive(output, out_dim, x, self.view)
            self.axes = output.ndim
            if isinstance(index, range) and index.start == 0:
                self.may_be_probabilities = _may_be_probabilities(output, out_dim)
            where: dict[str, Any] = {} if out_dim == 0 else {"sample_dim": out_dim}
            if isinstance(self.predictive, Predictive):
                counted = padding_mask(x, output, out_dim)
                self.padding_left_out = counted is not None
                if counted is not None:
                    where["counted"] = counted
                small = (
                    self.predictive.scaled_cotangent(output, probe, index, seed, **where)
                    if scaled
                    else None
                )
                if small is not None:
                    return Scaled(*small)
            return self.predictive.cotangent(output, probe, index, seed, **where)

        return cotangent

    def _require_rows(self, output: Tensor, x: Any, asked: int) -> None:
        """Raise InputError unless the output holds one row for each input that was asked for."""
        rows = self.view.sample_count(output)
        if rows == asked:
            return
        if not along(x, asked, self.options.in_dim):
            raise InputError(
                f"the output holds {rows} rows for {asked} inputs, and no input tensor has {asked} "
                f"samples on axis {self.options.in_dim}: batch(start, stop) of the inputs returns "
                "stop - start samples"
            )
        raise InputError(
            f"the model returned {rows} row{'s' * (rows != 1)} for {asked} "
            f"input{'s' * (asked != 1)} on axis {self.options.out_dim}: return one for each, or "
            "pass out_dim="
        )

    def _warn_unless_layer_made_output(self, x: Any) -> None:
        """Warn of a sigmoid unless the output for x is that of a layer: logits may be small."""
        self.may_be_probabilities = False
        if not _last_operation(self.forward(x)).startswith(_LAYERS):
            warn_of_sigmoid(self.predictive)

    def norms(self, start: int, stop: int, draw: Draw) -> ChunkNorms:
        """Return the norms of these samples, of which some are audited.

        Raises InputError where the model gives another number of samples.
        """
        x = self.inputs(start, stop)
        with self.autocast():
            norms = self.engine.run(x, self.cotangent(range(start, stop), x), draw)
        if self.may_be_probabilities:
            self._warn_unless_layer_made_output(x)
        samples = norms.table.shape[1]
        if samples != stop - start:
            raise InputError(
                f"inputs {start}..{stop - 1} gave {samples} samples at "
                f"out_dim={self.options.out_dim}: the sample axes are in_dim= and out_dim=, and "
                "batch(start, stop) must return stop - start samples"
            )
        if start == 0:
            self._warn_of_shared_rows(x)
        return norms

    def _warn_of_shared_rows(self, x: Any) -> None:
        """Warn of inputs with as many rows as samples of which every sample uses all."""
        plan = self.engine.plan
        count = plan.count
        shared = shared_inputs(x, plan, self.options.in_dim)
        names = [name for name, has_a_row_a_sample in shared if has_a_row_a_sample]
        if count > 1 and names:
            warn(
                f"every sample uses all {count} rows of {names[0]} of a chunk, as in f(x) @ "
                "g(y).T (CLIP's logits_per_image): the value depends on batch_size. Fix that input "
                "in the model, by functools.partial, say, and measure the others"
            )

    def batch_gradient(self, start: int, stop: int) -> ChunkNorms:
        """Return a batch gradient's squared norm, times B, as the norms of one sample.

        It is ``B ||gradient of the batch's mean log-likelihood of sampled labels||^2``.
        """
        if not self.refusals_checked:
            few = range(start, min(stop, start + 2))
            two = self.inputs(few.start, few.stop)
            with self.autocast():
                self.engine.run(two, self.cotangent(few, two, "sampled"), Draw(2))
                if self.engine.plan.by_sample:
                    refuse_mixed_gradients(self.engine, self.inputs(start, stop))
            self.refusals_checked = True
        x = self.inputs(start, stop)
        with self.autocast(), self.engine.without_caches(x):
            z = self.view.forward(copied(x))
        v = self.cotangent(range(start, stop), x, "sampled", scaled=False)(z.detach()) / (
            stop - start
        )
        if self.may_be_probabilities:
            self._warn_unless_layer_made_output(x)
        grads = gradient_of_batch(self.view, z, v)
        table = torch.stack([g.square().sum() for g in grads])[:, None] * (stop - start)
        return ChunkNorms(table, dict.fromkeys(self.engine.parameters, "batch gradient"))

    def description(self) -> str:
        """Return what the outputs were taken for, as text."""
        return (
            f"{self.predictive!r} without padding"
            if self.padding_left_out
            else repr(self.predictive)
        )

    def identity(self) -> str:
        """Return what identifies the distribution of the labels."""
        return of_predictive(self.predictive, self.axes)


def ends_in_sigmoid(output: Tensor) -> bool:
    """Return True if the last operation of an output's graph is a sigmoid, but for views of it."""
    return _last_operation(output).startswith("Sigmoid")


def _last_operation(output: Tensor) -> str:
    """Return the name of the last node of an output's graph, but for views and casts of it."""
    node = output.grad_fn
    while node is not None and node.name().startswith(VIEWS):
        node = node.next_functions[0][0]
    return node.name() if node is not None else ""


def _may_be_probabilities(output: Tensor, out_dim: int) -> bool:
    """Return True if all numbers of an output are between 0 and 1, and samples differ."""
    low, high = output.aminmax(dim=out_dim)
    samples_differ = output.shape[out_dim] == 1 or bool((low < high).any())
    return samples_differ and bool(((low >= 0) & (high <= 1)).all())


def warn_of_sigmoid(predictive: Any) -> None:
    """Warn that the outputs are probabilities, where the distribution takes logits."""
    if isinstance(predictive, (Categorical, Bernoulli)):
        warn(
            f"the outputs look like those of a sigmoid, probabilities, but {predictive!r} takes "
            "logits, so the value is another, far too low: leave out the model's last sigmoid, "
            "with predictive=fastlr.Bernoulli(), whose labels are 1 with probability sigmoid(z)"
        )


def default_predictive(output: Tensor, out_dim: int, x: Any, view: ModelView) -> Predictive:
    """Return Categorical() for logits [B, C >= 2], and for those of a language model.

    For other outputs raises an InputError that says what to pass.
    """
    shape = tuple(output.shape)
    if out_dim == 0 and _are_logits_of_tokens(output, x, view):
        refuse_probabilities(output)
        return Categorical()
    if output.ndim == 2 and out_dim == 0 and shape[1] >= 2:
        refuse_probabilities(output)
        return Categorical()
    if output.ndim == 1 or (output.ndim == 2 and 1 in shape):
        hint = (
            "a single value per sample: pass predictive=fastlr.Bernoulli() for a logit (what comes "
            "before a sigmoid), Gaussian(sigma) for regression"
        )
    else:
        hint = (
            "pass predictive=fastlr.Categorical() for logits at several positions (dim= is the "
            "class axis, by default the last), Bernoulli() for independent labels, "
            "Gaussian(sigma) for regression"
        )
    raise InputError(
        f"the output has shape {shape} (samples on axis {out_dim}), which does not tell what it "
        f"means: {hint}"
    )


def _are_logits_of_tokens(output: Tensor, x: Any, view: ModelView) -> bool:
    """Return True if a model of token ids [B, T] gives a number for each token, [B, T, C].

    C must be the number of tokens that their embedding knows. It must differ from T and from the
    dimension of every embedding: else the output may have other axes, or be features.
    """
    if output.ndim != 3 or output.shape[1] == output.shape[2]:
        return False
    *positions, classes = output.shape
    tables = [m for m in view.module.modules() if isinstance(m, nn.Embedding)]
    leaves = [t for t in tree_leaves(x) if isinstance(t, Tensor) and t.dtype in TOKENS]
    has_tokens = any(list(t.shape) == positions for t in leaves)
    if not has_tokens or any(table.embedding_dim == classes for table in tables):
        return False
    few = view.batch(x, positions[0]).pick(range(min(2, positions[0])))
    tokens = [t.long().flatten() for t in tree_leaves(few) if isinstance(t, Tensor)]
    seen: list[bool] = []  # of each table of that size that is used: whether it takes the tokens

    def note(_: nn.Module, inputs: tuple, __: Any) -> None:
        taken = [t.long().flatten() for t in inputs]
        seen.append(any(torch.equal(i, t) for i in taken for t in tokens))

    with eval_mode(view.module, view.device), ExitStack() as hooks:
        for table in tables:
            if table.num_embeddings == classes:
                hooks.callback(table.register_forward_hook(note).remove)
        view.forward(few)
    return any(seen)


def refuse_probabilities(output: Tensor) -> None:
    """Raise InputError for outputs [B, C] or [B, T, C] that a softmax gave.

    The softmax of these probabilities is another, far flatter distribution.

    Rows of 1 / C are such too: what a softmax gives of a zero-initialised layer. Logits hardly sum
    to one in every row.
    """
    close = max(torch.finfo(output.dtype).eps, 1e-5)  # the sum of C rounded values that sum to one
    off = (output.sum(-1, dtype=torch.float64) - 1).abs().amax()
    refuse_where(
        (output.amin() >= 0) & (off <= close),
        lambda: InputError(
            f"the outputs {list(output.shape)} {output.dtype} look like probabilities: none is "
            "negative and every row sums to one, but the default predictive, Categorical, takes "
            "the softmax of logits. Return logits (leave out the model's softmax), or pass "
            "predictive=fastlr.Categorical() to take these values as logits anyway"
        ),
    )


def _move_samples(t: Any, in_dim: int, size: int) -> Any:
    """Move the samples of a batched tensor (axis 0 of that size) to ``in_dim``."""
    if not isinstance(t, Tensor) or t.ndim == 0 or t.shape[0] != size:
        return t
    if not -t.ndim <= in_dim < t.ndim:
        raise InputError(f"in_dim={in_dim} is not an axis of an input of shape {tuple(t.shape)}")
    return t.movedim(0, in_dim)
