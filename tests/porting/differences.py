"""Claims of the page of differences: a phrase of it, a program, and what it gives here and not there."""

from __future__ import annotations

CLAIMS: list[tuple[str, str, str]] = [
    # -- lines to change
    (
        "what is opened is read-only",
        "td.memmap('d'); T.load_memmap('d')['a'].fill_(7); T.load_memmap('d')['a'].sum().item()",
        "3.0",
    ),
    ("Texts from HDF5 are `str`", "named.to_h5('f.h5')['s']", "text"),
    ("gives a future always", "type(td.memmap('d', return_early=True).result()).__name__", "TensorDict"),
    ("a value for the whole batch stays one value", "named.unsqueeze(0)['s']", "text"),
    (
        "rows that nobody wrote are None",
        "td[0] = T({'a': torch.ones(()), 's': 'x'}, []); list(td['s'])",
        "['x', None, None]",
    ),
    (
        "the switch concerns stacking only",
        "with M.set_lazy_legacy(True):\n    v = td.unsqueeze(0)\ntype(v).__name__",
        "TensorDict",
    ),
    ("leaves do not fit the batch size", "td.quantile(torch.tensor([0.1, 0.5]), dim=0).batch_size", "ValueError"),
    ("a `NonTensorStack` is no lazy stack", "isinstance(M.NonTensorStack('a'), M.LazyStackedTensorDict)", "False"),
    ("a `NonTensorData` no tensorclass", "M.is_tensorclass(M.NonTensorData('a'))", "False"),
    (
        "categories are their texts",
        "list(T.from_pandas(pd.DataFrame({'c': pd.Categorical(['x', 'y'])}))['c'])",
        "['x', 'y']",
    ),
    ("it brings `open` and `copy`", "'open' in M.__all__ and 'copy' in M.__all__", "True"),
    # -- stored data
    (
        "takes new entries, and forgets them",
        "td.to_h5('f.h5').close(); h = M.PersistentTensorDict.from_h5('f.h5', mode='r'); h['n'] = torch.zeros(3)",
        "RuntimeError",
    ),
    (
        "always encoded",
        "T({'a.b/c': torch.ones(1)}).memmap('d', robust_key=False); T.load_memmap('d')['a.b/c'].item()",
        "1.0",
    ),
    ("stored data (h5, zarr, redis): `select`", "list(td.to_h5('f.h5').select('a').keys())", "['a']"),
    ("`view`", "td.to_h5('f.h5').view(3, 1).batch_size", "torch.Size([3, 1])"),
    ("`popitem`", "td.to_h5('f.h5').popitem()[0]", "a"),
    ("`set_non_tensor`", "td.to_h5('f.h5').set_non_tensor('q', 'x')['q']", "x"),
    (
        "stored without its graph",
        "td.to_h5('f.h5').set('g', torch.ones(3, requires_grad=True))['g'].sum().item()",
        "3.0",
    ),
    ("replaces that entry, as everywhere", "two.to_h5('f.h5').rename_key_('a', 'b')['b'].sum().item()", "3.0"),
    ("may write nothing", "td.to_h5('f.h5').update_({'a': torch.zeros(3)})['a'].sum().item()", "0.0"),
    ("is written, in blocks", "h = td.to_h5('f.h5'); h.add_(1); h['a'].sum().item()", "6.0"),
    (
        "what it was",
        "td.to('cpu').to_h5('f.h5').close(); M.PersistentTensorDict.from_h5('f.h5').device",
        "cpu",
    ),
    (
        "names of dimensions after saving and loading",
        "T({'a': torch.ones(3)}, [3], names=['t']).memmap('d'); T.load_memmap('d').names",
        "['t']",
    ),
    ("moved in place", "td.to_h5('f.h5').memmap_('d')['a'].sum().item()", "3.0"),
    ("taken, without effect", "h = td.to_h5('f.h5'); h.batch_size = [5]", "RuntimeError"),
    ("of a locked HDF5 TensorDict", "td.to_h5('f.h5').lock_().rename_key_('a', 'q')", "RuntimeError"),
    ("of a nested TensorDict | removes it | refused", "nested.rename_key_('n', ('n', 'm'))", "KeyError"),
    ("a lazy stack of its elements", "type(M.lazy_stack([td, td]).to_h5('f.h5')).__name__", "LazyStackedTensorDict"),
    # -- writes
    (
        "some leaves are written",
        "attempt(lambda: td.update({'a': torch.zeros(3), 'x': torch.zeros(2)})); td['a'].sum().item()",
        "3.0",
    ),
    (
        "values are cast to the leaf's dtype",
        "i = T({'i': torch.arange(3)}, [3]); i[[0]] = T({'i': torch.ones(1)}, [1]); i['i'].tolist()",
        "[1, 1, 2]",
    ),
    (
        "brings that entry, not its siblings",
        "list(T({}, [3]).update(nested, keys_to_update=[('n', 'a')])['n'].keys())",
        "['a']",
    ),
    ("brings all of `n`", "nested.clone().update(nested * 0, keys_to_update=['n'])['n', 'a'].sum().item()", "0.0"),
    ("keep the other entries", "sorted(nested.create_nested(('n', 'new'))['n'].keys())", "['a', 'b', 'new']"),
    ("`set_` needs the entry", "attempt(lambda: td.set_(('m', 'b'), torch.ones(3))); 'm' in td", "False"),
    # -- shapes
    ("it is for tensors", "td.expand(-1).batch_size", "torch.Size([3])"),
    (
        "that one index table",
        "T({'a': torch.ones(3)}, [3], names=['t'])[torch.tensor([[0, 1]])].names",
        "[None, None]",
    ),
    ("it does not reach into features", "T({'a': torch.ones(3)}, [])[:1]", "IndexError"),
    ("`norm` of ragged entries", "M.lazy_stack([T({'x': torch.ones(n)}) for n in (1, 3)]).norm()['x'].item()", "2.0"),
    (
        "ends within the stack",
        "lazy = M.lazy_stack([two, two]); lazy.batch_size = [2]; lazy.batch_size",
        "torch.Size([2])",
    ),
    # -- maths
    ("reduce all of them", "T({'a': torch.ones(2, 2) * 2}, [2, 2]).prod((0, 1))['a'].item()", "16.0"),
    ("2 ** td", "(2 ** td)['a'].tolist()", "[2.0, 2.0, 2.0]"),
    ("comparisons keep names", "(T({'a': torch.ones(3)}, [3], names=['t']) == 1).names", "['t']"),
    ("torch's functions of one TensorDict", "torch.exp(td * 0)['a'].sum().item()", "3.0"),
    ("Arithmetic works under `torch.vmap`", "torch.vmap(lambda t: t + 1)(td)['a'].sum().item()", "6.0"),
    (
        "the function sees a TensorDict",
        "rows = M.lazy_stack([T({'a': torch.ones(2)}), T({'a': torch.ones(2)})]); seen = []\n"
        "torch.vmap(lambda t: (seen.append(type(t).__name__), t['a'])[1])(rows); seen[0]",
        "TensorDict",
    ),
    (
        "is over its elements",
        "M.lazy_stack([T({'x': torch.ones(1)}, [1]) for _ in range(2)]).softmax(0)['x'].flatten().tolist()",
        "[0.5, 0.5]",
    ),
    # -- values and tensorclasses
    (
        "and one batch dimension",
        "M.NonTensorStack(M.NonTensorStack('a', 'b'), M.NonTensorStack('c')).batch_size",
        "torch.Size([2])",
    ),
    (
        'the first row is `["a", "a"]`',
        "row = M.NonTensorStack(M.NonTensorData('a', batch_size=[2]), M.NonTensorStack('c', 'd'))[0]; row.data",
        "['a', 'a']",
    ),
    (
        "Complex numbers become tensors",
        "T({'z': 1j})['z'].dtype if isinstance(T({'z': 1j})['z'], torch.Tensor) else 'value'",
        "torch.complex64",
    ),
    ("`device` is None", "named.to('cpu').get('s').device", "None"),
    (
        "Structured arrays are read",
        "T.from_struct_array(np.array([(1, 2.0)], dtype=[('x', 'i8'), ('y', 'f4')]))['y'].item()",
        "2.0",
    ),
    (
        "one of a class that is one already",
        "C = M.tensorclass(type('C', (), {'__annotations__': {'x': torch.Tensor}})); M.tensorclass(C) is C",
        "True",
    ),
    (
        "True for decorated classes",
        "C = M.tensorclass(type('C', (), {'__annotations__': {'x': torch.Tensor}})); issubclass(C, M.TensorClass)",
        "True",
    ),
    # -- parameters
    (
        "`TensorDictParams` has `map`",
        "M.TensorDictParams(td.clone()).apply(lambda p: p + 1, inplace=True)['a'].sum().item()",
        "6.0",
    ),
    ("`lock=True` locks it", "M.TensorDictParams(td.clone(), lock=True).is_locked", "True"),
    ("takes the device of `other`", "td.to(T({'b': torch.ones(1)}, [], device='cpu')).device", "cpu"),
    ("locked again, also when its body raised", "td.lock_(); attempt(lambda: failing(td)); td.is_locked", "True"),
    ("is a `NotAGroupError`", "td[[0]] = T({'a': {'b': torch.ones(1)}}, [1])", "KeyError"),
]
"""(phrase, program, what is shown here: the last expression, or the built-in class of the error)"""
