"""IntDIANA (IntSGD, appendix A.2, algorithm 3): SGD for ranks with different data that sends only integers."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import ForeignGroupTransport, LoopbackTransport, Transport, contiguous_values, ring_bytes
from thinwire.compat import group_timeout
from thinwire.kernels import derive_key, square_sums
from thinwire.optim.integers import IntegerStats, IntegerSum

Estimator = Literal["gd", "minibatch", "lsvrg"]
Block = Literal["layer", "global", "coordinate"]

_ROUNDING, _COIN = 1, 2
_SHARED = -1
_COMMON = ("estimator", "p", "bits", "block", "beta", "eps", "seed")
_CLIPPED_SHARE = 0.01


class IntDIANA(torch.optim.Optimizer):
    """Distributed SGD that sends only integers, also if the data of ranks differ in distribution.

    Rank i keeps a shift ``h_i`` and sends ``q_i = Int(α (g_i − h_i))``, rounded at random; all keep the mean shift h:

        h_i += q_i / α;   g̃ = h + Σ q_i / (n α);   x −= lr · g̃;   h = g̃

    With IntSGD's ``q_i = Int(α g_i)`` integers grow without bound near the optimum, where α grows and g_i does not
    vanish; here g_i − h_i and 1/α vanish together. The first step is exact, in the parameters' dtype.

        optimizer = IntDIANA(model.parameters(), lr=0.1, estimator="lsvrg", p=0.05)
        for batch in batches:
            optimizer.step(lambda: loss_of(batch), lambda: loss_of(all_data_of_this_rank))

    where ``loss_of`` calls ``backward()`` and returns the loss. The model is the plain module, not in DDP, which would
    average gradients before they are compressed. Replicas start from rank 0's parameters and stay bit-identical.

    ``α = √d_l / √(2n·r_l + (d_l/d)·eps²)`` for a block l of d_l of all d parameters, with
    ``r = beta·r + (1 − beta)·‖g̃‖²``: propositions 2 and 4 at a constant learning rate, where ‖x − x_before‖ is lr·‖g̃‖;
    ``beta=0`` is proposition 3, which theorem 4 takes. If f is L-smooth and μ-strongly convex, "gd" then converges
    linearly: the rounding of n ranks' d values has a variance of at most ``d / (4nα²) = ½‖g̃_before‖²``, so that for
    ``lr ≤ 1/(4L)`` the expectation of ``‖x − x*‖² + 3·lr²·‖g̃_before‖²`` falls by ``max(1 − lr·μ, 2/3)`` a step.

    Args:
        params: parameters or groups of them, fp32 or fp64, on the CPU. ``lr`` may differ by group.
        lr: learning rate.
        estimator: what the closure's gradient is: "gd", of this rank's whole loss; "minibatch", of a part of it;
            "lsvrg", of a part as well, whose variance is reduced with a reference point w_i (`step`).
        p: "lsvrg": the probability of a new reference point in a step, drawn alike on all ranks. The paper uses the
            batch size divided by the number of samples of a rank.
        bits: 8 or 32, of the integers that are summed. Values that might overflow a sum are clipped; the shift makes up
            for that in later steps.
        block: which parameters share an α: those of a "layer" (a parameter tensor), all of them ("global"), or none
            ("coordinate").
        beta: of the moving average r.
        eps: keeps α finite if gradients vanish.
        seed: of the rounding and of the coin. No global generator is touched.
        group: process group; the default one if None. Without ``torch.distributed`` the world has one rank.
        transport: used in place of the group.

    Raises:
        TypeError: a parameter's dtype is neither fp32 nor fp64.
        NotImplementedError: a parameter is not on the CPU.
        ValueError: an option is out of range, or 8 bits are too few for so many ranks.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        estimator: Estimator = "gd",
        p: float = 0.05,
        bits: int = 32,
        block: Block = "layer",
        beta: float = 0.0,
        eps: float = 1e-8,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
    ) -> None:
        _check(lr, estimator, p, block, beta, eps, seed)
        self._transport = transport if transport is not None else _transport(group)
        self._sum: IntegerSum | None = None
        self._stats = IntegerStats()
        self._warned = False
        IntegerSum([], bits, self._transport)  # raises if the options do not fit the world
        defaults = {
            "lr": lr,
            "estimator": estimator,
            "p": p,
            "bits": bits,
            "block": block,
            "beta": beta,
            "eps": eps,
            "seed": seed,
            "step": 0,
            "rank": self._transport.rank,
            "world_size": self._transport.world_size,
        }
        super().__init__(params, defaults)

    @property
    def stats(self) -> IntegerStats:
        """Totals so far: integers sent, the largest ones, bytes, evaluations."""
        return self._stats

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``. Options other than ``lr`` are those of all groups.

        Raises ``RuntimeError`` after the first step.
        """
        if self._stats.steps or (self.param_groups and self.param_groups[0]["step"]):
            raise RuntimeError("IntDIANA has made steps already: make a new one, its first step is exact")
        for name in _COMMON:
            if name in param_group and param_group[name] != self.defaults[name]:
                raise ValueError(f"{name} is one for all groups of IntDIANA; only lr may differ")
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _check_parameter(parameter)
            if self._transport.world_size > 1:
                with contiguous_values(parameter) as values:
                    self._transport.broadcast(values)
        self._sum = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit from the ``state_dict`` that this rank saved, beside the parameters.

        Raises ``ValueError`` if it is another rank's, or of a world of another size. Shifts belong to the data of one
        rank: if data are divided differently, start a new IntDIANA, whose first step is exact.
        """
        saved = state_dict["param_groups"][0]
        for name, here in (("world_size", self._transport.world_size), ("rank", self._transport.rank)):
            if saved.get(name) != here:
                raise ValueError(
                    f"this state of IntDIANA has {name} {saved.get(name)}, this process has {here}: every rank loads "
                    "the state that it saved; with another number of ranks start a new IntDIANA from the parameters"
                )
        super().load_state_dict(state_dict)
        self._sum = None

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any], full: Callable[[], Any] | None = None
    ) -> Any:
        """Perform one step, on every rank; returns what ``closure`` returns at the present parameters.

        Args:
            closure: computes this rank's loss, calls ``backward()`` and returns it. Gradients are cleared before it.
                With "lsvrg" it is called twice, at the present parameters and at the reference point, and must take
                the same samples (and the same random draws, if the model has any) both times.
            full: "lsvrg" only: the same over all data of this rank. It is called in the first step (then alone)
                and whenever a new reference point is drawn.

        Afterwards every parameter's ``grad`` is g̃, the estimate that was applied, the same on every rank.

        Raises:
            TypeError: a closure is missing.
            FloatingPointError: a gradient is not finite on some rank. Raised on every rank; parameters and state are
                as they were before.
            TransportError: a rank is gone or silent.
        """
        options = self.param_groups[0]
        if not callable(closure) or (options["estimator"] == "lsvrg") != callable(full):
            raise TypeError(
                'IntDIANA.step() takes a closure that calls backward(), and with estimator="lsvrg" a second one over '
                "all data of the rank: optimizer.step(closure, full)"
            )
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        loss, gradients, reference = self._estimate(parameters, closure, full)
        with torch.no_grad():
            if options["step"] == 0:
                estimates = self._exact(gradients)
            else:
                estimates = self._compressed(parameters, gradients)
            self._update(parameters, estimates, reference)
        return loss

    def _estimate(
        self, parameters: Sequence[Tensor], closure: Callable[[], Any], full: Callable[[], Any] | None
    ) -> tuple[Any, list[Tensor], list[Tensor] | None]:
        """The closure's loss, this rank's g_i, and the gradient at a new reference point if there is one."""
        step = self.param_groups[0]["step"]
        if full is None:
            loss, gradients = self._evaluate(parameters, closure)
            return loss, gradients, None
        if step == 0:
            loss, gradients = self._evaluate(parameters, full)
            return loss, gradients, [gradient.clone() for gradient in gradients]
        loss, gradients = self._evaluate(parameters, closure)
        present = [parameter.detach().clone() for parameter in parameters]
        try:
            _set(parameters, [self.state[parameter]["w"] for parameter in parameters])
            _, there = self._evaluate(parameters, closure)
        finally:
            _set(parameters, present)
        for parameter, gradient, other in zip(parameters, gradients, there, strict=True):
            gradient.sub_(other).add_(self.state[parameter]["u"])
        return loss, gradients, self._evaluate(parameters, full)[1] if self._coin(step) else None

    def _evaluate(self, parameters: Sequence[Tensor], closure: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            loss = closure()
        self._stats = dataclasses.replace(self._stats, evaluations=self._stats.evaluations + 1)
        gradients = []
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise TypeError("IntDIANA takes dense gradients: make the embedding dense (sparse=False)")
            gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach())
            parameter.grad = None
        return loss, gradients

    def _coin(self, step: int) -> bool:
        options = self.param_groups[0]
        return derive_key(options["seed"], step, _COIN, _SHARED) < options["p"] * 2**64

    def _exact(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The first step's mean, in full precision; h_i becomes g_i, as with an infinite α."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        sent = ring_bytes(flat.numel() * flat.element_size(), self._transport.world_size)
        mean = flat.clone()
        self._transport.all_reduce(mean)
        mean /= self._transport.world_size
        parts = mean.split([gradient.numel() for gradient in gradients])
        _raise_for([not bool(torch.isfinite(part).all()) for part in parts])
        self._stats = dataclasses.replace(self._stats, sent_bytes=self._stats.sent_bytes + sent)
        shifts = iter(gradients)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["h_i"] = next(shifts).clone()
        return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

    def _compressed(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """g̃ from integers; h_i follows."""
        options = self.param_groups[0]
        sums = self._sum = self._sum or IntegerSum([p.numel() for p in parameters], options["bits"], self._transport)
        rank, num_ranks = self._transport.rank, self._transport.world_size
        alphas = self._alphas(parameters)
        differences = [g - self.state[p]["h_i"] for p, g in zip(parameters, gradients, strict=True)]
        flags = [not bool(torch.isfinite(difference).all()) for difference in differences]
        if options["block"] == "coordinate":
            factors = torch.ones(len(parameters), dtype=torch.float32, device="cpu")
            differences = [alpha * difference for alpha, difference in zip(alphas, differences, strict=True)]
        else:
            factors = torch.stack(alphas).float()
            # What was multiplied is what has to be divided by: the scale as fp32 has it.
            alphas = [factor.to(p.dtype) for factor, p in zip(factors, parameters, strict=True)]
        key = derive_key(options["seed"], options["step"], _ROUNDING, rank)
        clipped = sums.add(differences, factors, flags, key)
        _raise_for([flag > 0 for flag in sums.not_finite])
        self._note(sums, clipped, sum(p.numel() for p in parameters))
        estimates = []
        for index, (parameter, alpha) in enumerate(zip(parameters, alphas, strict=True)):
            state = self.state[parameter]
            state["h_i"] = state["h_i"] + sums.sent(index).to(parameter.dtype).view_as(parameter) / alpha
            mean = sums.total(index).to(parameter.dtype).view_as(parameter) / alpha / num_ranks
            estimates.append(state["h"] + mean)
        return estimates

    def _alphas(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """By parameter: a scalar, or one a coordinate."""
        options = self.param_groups[0]
        num_all, twice = sum(p.numel() for p in parameters), 2 * self._transport.world_size
        alphas = []
        for parameter in parameters:
            # Squares and roots in fp64: neither of a parameter's extremes leaves its range.
            rms = self.state[parameter]["rms"].double()
            size = {"layer": parameter.numel(), "global": num_all, "coordinate": 1}[options["block"]]
            alpha = math.sqrt(size) / (twice * rms.square() + size / num_all * options["eps"] ** 2).sqrt()
            alphas.append(alpha.to(parameter.dtype))
        return alphas

    def _update(
        self, parameters: Sequence[Tensor], estimates: Sequence[Tensor], reference: list[Tensor] | None
    ) -> None:
        self._update_scales(parameters, estimates)
        for group in self.param_groups:
            group["step"] += 1
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                state, estimate = self.state[parameter], estimates[index]
                state["h"] = estimate.clone()
                if reference is not None:
                    state["w"], state["u"] = parameter.detach().clone(), reference[index]
                parameter.sub_(group["lr"] * estimate)
                parameter.grad = estimate
                index += 1
        self._stats = dataclasses.replace(self._stats, steps=self._stats.steps + 1)

    def _update_scales(self, parameters: Sequence[Tensor], estimates: Sequence[Tensor]) -> None:
        options = self.param_groups[0]
        beta = options["beta"] if options["step"] else 0.0
        # Summed in an order that no machine changes: all ranks must have the same α.
        each = options["block"] == "coordinate"
        squares = [e.double().square() for e in estimates] if each else list(square_sums(estimates))
        if options["block"] == "global":
            # Exactly rounded, so that it is the same on every machine.
            squares = [torch.tensor(math.fsum(map(float, squares)), dtype=torch.float64, device="cpu")] * len(squares)
        for parameter, square in zip(parameters, squares, strict=True):
            state = self.state[parameter]
            before = state["rms"].double().square() if beta else 0.0
            state["rms"] = (beta * before + (1 - beta) * square).sqrt().to(parameter.dtype)

    def _note(self, sums: IntegerSum, clipped: int, values: int) -> None:
        stats, (sent, total) = self._stats, sums.largest()
        self._stats = dataclasses.replace(
            stats,
            sent_bytes=stats.sent_bytes + sums.sent_bytes,
            values=stats.values + values,
            clipped=stats.clipped + clipped,
            largest_sent=max(stats.largest_sent, sent),
            largest_sum=max(stats.largest_sum, total),
            last_sent=sent,
            last_sum=total,
        )
        if clipped > _CLIPPED_SHARE * values and not self._warned:
            self._warned = True
            why = (
                "bits=32 leaves room"
                if self.param_groups[0]["bits"] == 8
                else "gradients have grown by orders of magnitude"
            )
            warnings.warn(
                f"IntDIANA clips {clipped / values:.1%} of the values of this step, to ±{sums.clip}: {why}",
                stacklevel=4,
            )


def _set(parameters: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _raise_for(not_finite: Sequence[bool]) -> None:
    bad = [index for index, flag in enumerate(not_finite) if flag]
    if bad:
        raise FloatingPointError(
            f"the gradient of parameter {bad[0]} of {len(not_finite)}, in the order given, is not finite on some rank; "
            "nothing was changed: lower lr, or look at the data"
        )


def _check(lr: float, estimator: str, p: float, block: str, beta: float, eps: float, seed: int) -> None:
    if not lr >= 0:
        raise ValueError(f"lr must not be negative, not {lr}")
    if estimator not in ("gd", "minibatch", "lsvrg"):
        raise ValueError(f'estimator must be "gd", "minibatch" or "lsvrg", not {estimator!r}')
    if block not in ("layer", "global", "coordinate"):
        raise ValueError(f'block must be "layer", "global" or "coordinate", not {block!r}')
    if not 0 < p <= 1:
        raise ValueError(f"p must be above 0 and at most 1, not {p}")
    if not 0 <= beta < 1:
        raise ValueError(f"beta must be at least 0 and below 1, not {beta}")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps must be above 0, not {eps}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be between 0 and 2**63 - 1, not {seed}")


def _check_parameter(parameter: Tensor) -> None:
    if parameter.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"IntDIANA takes fp32 or fp64 parameters, not {parameter.dtype}: keep a master copy in fp32")
    if parameter.device.type != "cpu":
        raise NotImplementedError(f"IntDIANA takes parameters on the CPU in this version, not on {parameter.device}")


def _transport(group: dist.ProcessGroup | None) -> Transport:
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return LoopbackTransport.world(1)[0]
        group = dist.group.WORLD
    assert group is not None
    return ForeignGroupTransport(group, group_timeout(group))
