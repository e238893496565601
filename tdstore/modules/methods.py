"""Parameters of modules in and out, as methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from tdstore.container.core.container import Container
from tdstore.container.entries.uninitialized import is_uninitialized
from tdstore.errors import InvalidStateError, InvalidTypeError
from tdstore.modules.optimizers import load_optimizer, optimizer_tree
from tdstore.modules.swapping import Loan, load_state, stacked, state_of, tensors_of
from tdstore.ops.base import check_container

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase
    from tdstore.tensordicts.resident.tensordict import TensorDict


class ModulesMixin(Container):
    """from_module, from_modules, to_module, from_optimizer, to_optimizer."""

    __slots__ = ()

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: bool = False,
        lock: bool = False,
        use_state_dict: bool = False,
        filter_empty: bool = True,
    ) -> TensorDictBase:
        """Return the parameters and buffers of a module, the very objects, nested as its submodules are.

        Args:
            module: a `torch.nn.Module`.
            as_module: return a `TensorDictParams`, which is a module itself.
            lock: lock the result.
            use_state_dict: use `module.state_dict()`: hooks run, tensors are detached, and
                buffers that are not persistent are left out.
            filter_empty: leave out submodules without any tensor; False keeps them, as empty TensorDicts.

        Raises:
            InvalidTypeError: `module` is not a `torch.nn.Module`.

        Example:
            >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
            >>> td = TensorDict.from_module(net)
            >>> td["0", "weight"] is net[0].weight
            True
        """
        if not isinstance(module, nn.Module):
            raise InvalidTypeError(f"from_module takes a torch.nn.Module, not a {type(module).__name__}")
        td = state_of(module) if use_state_dict else tensors_of(module, filter_empty)
        return cls._as_asked(td, as_module, lock)

    @classmethod
    def from_modules(
        cls,
        *modules: nn.Module,
        as_module: bool = False,
        lock: bool = True,
        use_state_dict: bool = False,
        lazy_stack: bool = False,
        expand_identical: bool = False,
    ) -> TensorDictBase:
        """Stack the parameters and buffers of modules of one architecture, for an ensemble under `torch.vmap`.

        Args:
            modules: `n` of them.
            as_module: as a `TensorDictParams`.
            lock: freeze the key set.
            use_state_dict: see `from_module`.
            lazy_stack: keep the modules' own parameters side by side: gradients arrive in them, and they may
                differ in shape. Default: new parameters of `[n, ...]`, and gradients arrive there.
            expand_identical: a parameter that all modules share is expanded, not copied.

        Parameters of lazy modules (`torch.nn.LazyLinear`, ...) that were not called are uninitialized here, too. The
        first call of a module under `torch.vmap` gives all of the stack their shape, and each values of its own.

        Raises:
            InvalidStateError: no modules; parameters that differ in name, in shape or in whether they require a
                gradient, without `lazy_stack`; `lazy_stack` and `as_module`.

        Example:
            >>> nets = [torch.nn.Linear(3, 4) for _ in range(2)]
            >>> params = TensorDict.from_modules(*nets)
            >>> params["weight"].shape
            torch.Size([2, 4, 3])
            >>> def call(params, x):
            ...     with params.to_module(nets[0]):
            ...         return nets[0](x)
            >>> torch.vmap(call, (0, None))(params, torch.zeros(3)).shape
            torch.Size([2, 4])
        """
        if not modules:
            raise InvalidStateError("from_modules: there are no modules to stack")
        if lazy_stack and as_module:
            raise InvalidStateError(
                "from_modules: a lazy stack is not a module: pass lazy_stack=True or as_module=True, not both"
            )
        tds = [cls.from_module(m, lock=False, use_state_dict=use_state_dict) for m in modules]
        if lazy_stack and any(is_uninitialized(t) for td in tds for t in td._leaf_list()):
            raise InvalidStateError(
                "from_modules: uninitialized parameters get their shape as one stack: pass lazy_stack=False, "
                "or call the modules first"
            )
        td = cls._stack_class(*tds, stack_dim=0) if lazy_stack else stacked(tds, expand_identical)
        return cls._as_asked(td, as_module, lock)

    @classmethod
    def _as_asked(cls, td: Any, as_module: bool, lock: bool) -> TensorDictBase:
        if as_module:
            made: TensorDictBase = cls._params_class(td, no_convert=True, lock=lock)
            return made
        found: TensorDictBase = td.lock_() if lock else td
        return found

    @overload
    def to_module(
        self,
        module: nn.Module,
        *,
        inplace: bool | None = None,
        return_swap: Literal[True] = True,
        swap_dest: Container | None = None,
        use_state_dict: bool = False,
        non_blocking: bool = False,
        preserve_module_state: bool = True,
        memo: dict[Any, Any] | None = None,
    ) -> TensorDictBase: ...

    @overload
    def to_module(
        self,
        module: nn.Module,
        *,
        inplace: bool | None = None,
        return_swap: bool,
        swap_dest: Container | None = None,
        use_state_dict: bool = False,
        non_blocking: bool = False,
        preserve_module_state: bool = True,
        memo: dict[Any, Any] | None = None,
    ) -> TensorDictBase | None: ...

    def to_module(
        self,
        module: nn.Module,
        *,
        inplace: bool | None = None,
        return_swap: bool = True,
        swap_dest: Container | None = None,
        use_state_dict: bool = False,
        non_blocking: bool = False,
        preserve_module_state: bool = True,
        memo: dict[Any, Any] | None = None,
    ) -> TensorDictBase | None:
        """Set these tensors as a module's parameters and buffers, and return those that it had.

        As a context manager, it does so for the body of the `with` block; afterwards the module has its own parameters
        again, the same objects, also after an exception. Parameters without a key here stay as they are.

        Args:
            module: the module to set parameters of.
            inplace: copy the values into the module's tensors, which stay the same objects.
            return_swap: False returns nothing.
            swap_dest: a TensorDict to put the former tensors in, which is returned.
            use_state_dict: go through `module.load_state_dict`, whose hooks run.
            non_blocking: of the copies of `inplace`.
            preserve_module_state: a tensor without gradient that replaces a parameter becomes a parameter, which
                requires a gradient if that one did, and parameters that were one object stay one if their values
                are equal. Of a dataset that was opened for reading, what training changes is copied: buffers,
                and parameters that require a gradient. False sets tensors as they are. (Tensors that require a
                gradient, and those that `torch.func` and `torch.compile` pass through a function, are always set as
                they are.)
            memo: places that are set already; share one dict to set no place twice in several calls.

        Raises:
            KeyNotFoundError: the module has no such parameter, buffer or submodule; nothing was changed.
            LockedError: `swap_dest` is locked; nothing was changed.

        Example:
            >>> net = torch.nn.Linear(3, 4)
            >>> zeros = TensorDict.from_module(net).data.clone().zero_()
            >>> with zeros.to_module(net):
            ...     net(torch.ones(3)).sum().item()
            0.0
        """
        if not isinstance(module, nn.Module):
            raise InvalidTypeError(f"to_module takes a torch.nn.Module, not a {type(module).__name__}")
        if swap_dest is not None:
            check_container(swap_dest, "swap_dest")
            if swap_dest.is_locked:
                raise swap_dest._refuse_locked("put what was in the module into swap_dest")
        if use_state_dict:
            old: Any = load_state(module, self, bool(inplace))
        else:
            loan = Loan(bool(inplace), bool(preserve_module_state), non_blocking, {} if memo is None else memo)
            data = loan.fill(self, module)
            old = _as_tree(self._resident_class, data) if return_swap or swap_dest is not None else None
        if swap_dest is not None:
            swap_dest.update(old)
            old = swap_dest
        if not return_swap:
            return None

        def give_back(swap: Any) -> None:
            Loan(bool(inplace), False, non_blocking, {}).fill(swap, module)

        old._undo = give_back
        substitute: TensorDictBase = old
        return substitute

    # -- optimizers --------------------------------------------------------------------------
    @classmethod
    def from_optimizer(cls, optimizer: torch.optim.Optimizer) -> TensorDict:
        """Return the state of an optimizer, to be saved on any backend: `state` and `param_groups`.

        Its tensors are the optimizer's own, its numbers and options are values.

        Raises:
            TypeError: not an optimizer; a state with keys that are neither names nor numbers.

        Example:
            >>> net = torch.nn.Linear(3, 4)
            >>> optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
            >>> TensorDict.from_optimizer(optimizer).save("run.h5")  # doctest: +SKIP
            >>> TensorDict.load("run.h5").to_optimizer(optimizer)  # doctest: +SKIP
        """
        return optimizer_tree(cls._resident_class, optimizer)

    def to_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the result of `from_optimizer` into an optimizer over the same parameters; tensors are copied.

        Raises:
            KeyNotFoundError: not the state of an optimizer. ValueError: of one with other groups of parameters.
        """
        load_optimizer(self._resident(), optimizer)


def _as_tree(cls: Any, data: dict[str, Any]) -> Any:
    tree = {key: _as_tree(cls, value) if isinstance(value, dict) else value for key, value in data.items()}
    return cls._new(tree, torch.Size(()), None, None)


def from_module(
    module: nn.Module, as_module: bool = False, lock: bool = True, use_state_dict: bool = False
) -> TensorDictBase:
    """Call `TensorDict.from_module(module, ...)`."""
    return Container._resident_class.from_module(module, as_module, lock, use_state_dict)


def from_modules(
    *modules: nn.Module,
    as_module: bool = False,
    lock: bool = True,
    use_state_dict: bool = False,
    lazy_stack: bool = False,
    expand_identical: bool = False,
) -> TensorDictBase:
    """Call `TensorDict.from_modules(*modules, ...)`."""
    return Container._resident_class.from_modules(
        *modules,
        as_module=as_module,
        lock=lock,
        use_state_dict=use_state_dict,
        lazy_stack=lazy_stack,
        expand_identical=expand_identical,
    )
