"""More claims of the page of differences, as in `differences`."""

from __future__ import annotations

MORE: list[tuple[str, str, str]] = [
    (
        "exchanges them",
        "l = M.lazy_stack([T({'a': torch.full((1,), i)}, [1]) for i in (1, 2)]); l.update(l[[1, 0]])['a'].tolist()",
        "[[2], [1]]",
    ),
    (
        "are refused at the end of the block",
        "with td.lock_().flatten_keys() as flat:\n    flat['new'] = torch.ones(3)\n'lost'",
        "RuntimeError",
    ),
    (
        "is a node of `torch.utils._pytree`",
        "import torch.utils._pytree as p; len(p.tree_leaves(M.nn.TensorDictParams(two)))",
        "2",
    ),
    (
        "closes the file at the end of the block",
        "h = td.to_h5('f.h5')\nwith h:\n    pass\nh['a'].sum().item()",
        "ValueError",
    ),
    (
        "refuse a key that is not there",
        "td.update_(T({'a': torch.ones(3), 'z': torch.ones(3)}, [3]))['a'].sum()",
        "KeyError",
    ),
    ("that is `named_apply` here", "td.apply(lambda key, x: x, named=True)['a'].shape", "TypeError"),
    ("the same after `expand` or `pad`", "named.expand(2, 3)['s']", "text"),
    ("a TensorDict takes no attributes of its own", "td.note = 1", "AttributeError"),
    ("text in an array is one value per row", "T({'s': np.array(['a', 'b'])}, [2])[0]['s']", "a"),
    ("tuples and lists stay what they are", "T({'s': ('a', 'b')})['s']", "('a', 'b')"),
    ("the second argument is the batch size", "M.NonTensorData('a', [2]).batch_size", "torch.Size([2])"),
    (
        "`pad_sequence` keeps the names",
        "M.pad_sequence([T({'a': torch.ones(n)}, [n], names=['t']) for n in (1, 2)]).names",
        "[None, 't']",
    ),
    ("torch.cat(tds, -3)", "torch.cat([T({'a': torch.ones(2, 3, 4)}, [2, 3])] * 2, -3)", "IndexError"),
    (
        "one index takes together",
        "i = torch.tensor([0, 1]); T({'a': torch.ones(2, 3)}, [2, 3], names=['x', 'y'])[i, i].names",
        "[None]",
    ),
    (
        "parts of an unflattened one",
        "T({'a': torch.ones(6)}, [6], names=['x']).unflatten(0, (2, 3)).names",
        "[None, None]",
    ),
    ("Neither do `[..., 0]`", "T({'a': torch.ones(3)}, [])[..., 0]", "IndexError"),
    ("The batch size of an empty TensorDict counts", "T({}, [3]).view(7).batch_size", "RuntimeError"),
    (
        "A lazy stack stays one in `expand`",
        "type(M.lazy_stack([td, td]).expand(2, 2, 3)).__name__",
        "LazyStackedTensorDict",
    ),
    ("a False mask in a tuple", "M.lazy_stack([td, td])[False, 0].batch_size", "torch.Size([0, 3])"),
    ("a bad index of one is an `IndexError`", "M.lazy_stack([td, td])[1.5]", "IndexError"),
    ("An order with a text", "(named < 'a')", "TypeError"),
    ("Arithmetic keeps empty nested TensorDicts", "'e' in (T({'a': torch.ones(2), 'e': {}}, [2]) + 1)", "True"),
    ("`is_floating_point()` are False", "named.get('s').is_floating_point()", "False"),
    ("is one list for each row", "T({'s': [['a', 'b'], ['c', 'd']]}, [2])[0]['s']", "['a', 'b']"),
    ("A list of dicts given to `from_any`", "type(T.from_any([{'a': 1}, {'a': 2}])).__name__", "LazyStackedTensorDict"),
    (
        "are a nested tensor; there torch's error",
        "T({'j': torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 3)], layout=torch.jagged)}, "
        "[3])[1:3]['j'].is_nested",
        "True",
    ),
    ("no `append`", "hasattr(M.NonTensorStack('a'), 'append')", "False"),
    (
        "`pad`, `max`, `min` and `set_at_` keep the class",
        "C = M.tensorclass(type('C', (), {'__annotations__': {'x': torch.Tensor}})); type(M.pad(C(torch.ones(2), "
        "batch_size=[2]), [0, 1])).__name__",
        "C",
    ),
    (
        '`"x" in obj` is True',
        "C = M.tensorclass(type('C', (), {'__annotations__': {'x': torch.Tensor}})); 'x' in C(torch.ones(2), "
        "batch_size=[2])",
        "True",
    ),
    ("write into the leaves of a locked `td`", "td.lock_().apply(lambda x: x + 1, out=td)['a'].sum().item()", "6.0"),
    ("`where(mask, other, out=td)` write", "td.lock_().where(td['a'] > 9, 2.0, out=td)['a'].sum().item()", "6.0"),
    ("refuses keywords that it does not have", "td.apply(lambda x: x, inplce=True)", "TypeError"),
    ("`assert_close` compares values", "M.assert_close(T({'s': 'a'}), T({'s': 'b'}))", "AssertionError"),
    (
        "`NonTensorData.where` chooses",
        "M.NonTensorData('a').where(torch.tensor(False), M.NonTensorData('b')).data",
        "b",
    ),
    ("An entry that is missing has no `entry_class`", "td.entry_class('zz')", "KeyError"),
    ("is no operand", "td + [1, 2]", "TypeError"),
    ("an update with what is no mapping", "td.update(5)", "TypeError"),
    ("An update without entries changes nothing, so that a lock", "td.lock_().update({}) is td", "True"),
    (
        "Keys stay in the order",
        "h = T({'b': torch.ones(1), 'a': torch.ones(1)}).to_h5('f.h5'); list(h.keys())",
        "['b', 'a']",
    ),
    (
        "`clone()` of a value that has no copy",
        "import threading; type(T({'l': M.NonTensorData(threading.Lock())}).clone()['l']).__name__",
        "lock",
    ),
    (
        "`state_dict()` of what `share_memory_()` moved",
        "s = td.share_memory_().state_dict(); s['a'].data_ptr() != td['a'].data_ptr()",
        "True",
    ),
    ("the class of `h5[0]`", "type(td.to_h5('f.h5')[0]).__name__", "PersistentTensorDict"),
    ("`h5.clone()`", "type(td.to_h5('f.h5').clone()).__name__", "TensorDict"),
    ("`td.saved_path`", "type(td.memmap('d').saved_path).__mro__[1].__name__", "str"),
    ("read-only `h5py.File`", "td.to_h5('f.h5').file.mode", "r"),
    ("`flatten_keys(inplace=True)`", "list(nested.to_h5('f.h5').flatten_keys(inplace=True).keys())", "['n.a', 'n.b']"),
    ("`exclude`", "list(two.to_h5('f.h5').exclude('a').keys())", "['b']"),
    ("`permute`", "two.to_h5('f.h5').permute(0).batch_size", "torch.Size([3])"),
    ("`unsqueeze`", "two.to_h5('f.h5').unsqueeze(0).batch_size", "torch.Size([1, 3])"),
    (
        "one value and rows of values never differ",
        "bool((T({'s': 'a'}, [2]) == T({'s': ['a', 'c']}, [2])).all())",
        "False",
    ),
    ("is ignored where missing keys are", "list(td.exclude(('a', 'deeper')).keys())", "['a']"),
    ("takes what `update` takes", "td.update({'s': 'x'}, clone=True)['s']", "x"),
    ("a value has at most 500 characters", "500 < len(repr(T({'s': 'x' * 9999}))) < 700", "True"),
    (
        "keeps the batch dimensions that a shorter index lacks",
        "T({'a': torch.ones(2, 3)}, [2, 3]).gather(0, torch.tensor([0])).batch_size",
        "torch.Size([1, 3])",
    ),
    ("They have no lock", "T({'s': M.NonTensorData('a', batch_size=[2])}, [2]).lock_().get('s').is_locked", "False"),
    ("`permute` names every dimension", "T({'a': torch.ones(2, 3)}, [2, 3]).permute()", "ValueError"),
    (
        "of a batch without a dimension of one gives the same batch back",
        "with td.squeeze() as v:\n    pass\nv is td",
        "True",
    ),
    ("can be viewed, split and chunked", "T({'a': torch.ones(0, 2)}, [0, 2]).view(-1).batch_size", "torch.Size([0])"),
    ("is False, and what `is_leaf=`", "'n' in nested.keys(True, True)", "False"),
    (
        "of an object of a class has its values",
        "C = M.tensorclass(type('C', (), {'__annotations__': {'x': torch.Tensor, 's': str}})); [k for k, _ in "
        "C(x=torch.ones(2), s='a', batch_size=[2]).non_tensor_items()]",
        "['s']",
    ),
    ("Values per row move with their rows", "list(T({'s': ['a', 'b']}, [2]).flip(0)['s'])", "['b', 'a']"),
    (
        "has each at its row",
        "list(torch.vmap(lambda t: t)(T({'s': ['x', 'y'], 'a': torch.ones(2)}, [2]))['s'])",
        "['x', 'y']",
    ),
    (
        "whose unbatched tensors differ is a `MismatchError`",
        "torch.stack([T({'u': M.UnbatchedTensor(torch.ones(1) * i)}) for i in (1, 2)])",
        "RuntimeError",
    ),
    (
        "that h5py has open for writing",
        "import h5py; f = h5py.File('g.h5', 'w'); f['b/x'] = np.ones(3); "
        "M.PersistentTensorDict(group=f['b'])['x'].sum().item()",
        "RuntimeError",
    ),
    (
        "change the parameters, as `fill_`",
        "p = M.TensorDictParams(T({'a': torch.ones(3)}, [3]))\np.mul_(2)\np[0] = 5\np['a'].tolist()",
        "[5.0, 2.0, 2.0]",
    ),
    (
        "each access gives a new object",
        "h = M.PersistentTensorDict.from_dict(nested, filename='i.h5', batch_size=[3])\nh.get('n') is h.get('n')",
        "False",
    ),
    (
        "reaches from a batch into the features",
        "torch.vmap(lambda t: t['a'], in_dims=1)(T({'a': torch.ones(2, 3)}, [2])).shape",
        "IndexError",
    ),
    (
        "stored data of a `TypedTensorDict` keep its class",
        "class C(M.TypedTensorDict):\n    a: torch.Tensor\n"
        "type(C(a=torch.ones(3), batch_size=[3]).to_h5('f.h5')).__name__",
        "C",
    ),
    ("as of `td[:3]` and `td[::2]`", "td.memmap_('d')[1:2].is_memmap()", "True"),
    (
        "`torch.func.grad`, `vjp`",
        "torch.func.grad(lambda t: t['a'].sum())(td.to_h5('f.h5'))['a'].tolist()",
        "[1.0, 1.0, 1.0]",
    ),
    (
        "they keep what they had",
        "F = M.MemoryMappedTensor.from_tensor; old = F(torch.zeros(1), filename='x'); "
        "F(torch.ones(1), filename='x', existsok=True); old.numpy().tolist()",
        "[0.0]",
    ),
    ("of memory-mapped data, without a folder", "td.memmap_('d').memmap_like()['a'].tolist()", "[0.0, 0.0, 0.0]"),
    (
        "replaces `n`, as everywhere",
        "h = nested.to_h5('f.h5'); h['n'] = {'a': torch.ones(3)}; list(h['n'].keys())",
        "['a']",
    ),
    ("write texts and other values, too", "named.update_(T({'s': 'new', 'a': torch.ones(3)}, [3]))['s']", "new"),
    ("`expand` and `narrow`", "type(M.lazy_stack([td, td]).narrow(0, 0, 1)).__name__", "LazyStackedTensorDict"),
    (
        "`set`, `pad` and stored data",
        "class C(M.TypedTensorDict):\n    a: torch.Tensor\n"
        "type(M.pad(C(a=torch.ones(3), batch_size=[3]), [0, 1])).__name__",
        "C",
    ),
    (
        "A class keeps its own `__repr__`",
        "C = M.tensorclass(type('C', (), {'__annotations__': {'x': torch.Tensor}, '__repr__': lambda c: 'mine'})); "
        "repr(C(torch.ones(3)))",
        "mine",
    ),
    (
        "A field that was deleted",
        "@M.tensorclass\nclass C:\n    x: torch.Tensor\n    y: torch.Tensor\n"
        "c = C(torch.ones(3), torch.ones(3)); del c.x; c.x",
        "None",
    ),
    (
        "and a nested dict given to `update`, become parameters",
        "type(M.TensorDictParams(nested).update({'n': {'a': torch.ones(3)}})['n', 'a']).__name__",
        "Parameter",
    ),
    (
        "leaves integers buffers",
        "type(M.TensorDictParams(T({'i': torch.arange(3)})).to(torch.float16)['i']).__name__",
        "Tensor",
    ),
    (
        "takes the values; there nothing changes",
        "p = M.TensorDictParams(td); p.load_state_dict((td * 2).state_dict(), assign=True); p['a'].sum().item()",
        "6.0",
    ),
    ("`share_memory_()` locks", "M.TensorDictParams(td).share_memory_().is_locked", "True"),
    (
        "writes these rows, as `window",
        "h = td.to_h5('f.h5'); part = getattr(h, '_get_sub_tensordict', h.__getitem__)(slice(1, 3)); "
        "part.set('a', torch.zeros(2)); h['a'].tolist()",
        "[1.0, 0.0, 0.0]",
    ),
    (
        "a key of zarr that is not there",
        "z = M.PersistentTensorDict.from_dict(td, 'f.zarr', backend='zarr'); del z['missing']",
        "KeyError",
    ),
    ("would copy or cast it give the value", "v = M.NonTensorData('x', batch_size=[3]); v.float() is v", "True"),
    (
        "there `view(5)` of twelve rows",
        "M.NonTensorData('x', batch_size=[4, 3]).view(5)",
        "RuntimeError",
    ),
    (
        "Shape methods of a `NonTensorStack` give",
        "type(M.NonTensorStack('a', 'b').flip(0)).__name__",
        "NonTensorStack",
    ),
    (
        "comes back as it was, batch size and all",
        "M.NonTensorData('x', batch_size=[3]).memmap('p'); list(T.load_memmap('p').batch_size)",
        "[3]",
    ),
    (
        "`to_h5` and `consolidate(path)` lose the values",
        "M.NonTensorStack('x', 'y').to_h5('f.h5'); [getattr(T.from_h5('f.h5'), 'data', None)]",
        "[['x', 'y']]",
    ),
    (
        "A number that an entry cannot hold (300 in bytes, NaN in integers) is refused",
        "b = T({'b': torch.zeros(3, dtype=torch.uint8)}, [3]); b[0] = 300",
        "ValueError",
    ),
    (
        "does not take one over by `load_memmap_`",
        "M.NonTensorData('x').memmap('p'); td.clone().load_memmap_('p')",
        "TypeError",
    ),
    ("and no tensors (`is_memmap()`", "M.NonTensorData('x').share_memory_().is_shared()", "False"),
    (
        "join with those of their class and with TensorDicts",
        "C = type('C', (M.TensorClass,), {'__module__': 'm', '__annotations__': {'a': torch.Tensor}}); "
        "type(torch.cat([C(a=torch.ones(3), batch_size=[3]), td])).__name__",
        "C",
    ),
    (
        "elements of `lazy_stack` are TensorDicts",
        "C = type('C', (M.TensorClass,), {'__module__': 'm', '__annotations__': {'a': torch.Tensor}}); "
        "type(M.lazy_stack([C(a=torch.ones(3), batch_size=[3]), td])[0]).__name__",
        "TensorDict",
    ),
    (
        "has one dimension for such lists, whatever their lengths",
        "list(T.from_dict({'s': [['a', 'b'], ['c', 'd']]}, auto_batch_size=True).batch_size)",
        "[2]",
    ),
    (
        "a pickle of that one is, too",
        "import pickle; type(pickle.loads(pickle.dumps(M.TensorDictParams(td).consolidate()))).__name__",
        "TensorDict",
    ),
    (
        "given to a process that starts afresh",
        "import io, pickle; from multiprocessing.context import set_spawning_popen; "
        "from multiprocessing.reduction import ForkingPickler; "
        "popen = type('P', (), {'duplicate_for_child': lambda self, fd: fd, 'DupFd': lambda self, fd: fd})(); "
        "mapped, file = td.memmap_(), io.BytesIO(); set_spawning_popen(popen); ForkingPickler(file).dump(mapped); "
        "set_spawning_popen(None); pickle.loads(file.getvalue())['a'].add_(1); mapped['a'].tolist()",
        "[1.0, 1.0, 1.0]",
    ),
]

ADOPTED = [
    "A field that was deleted",
    "`popitem`",
    "replaces that entry, as everywhere",
    "may write nothing",
    "is written, in blocks",
    "names of dimensions after saving and loading",
    "taken, without effect",
    "brings all of `n`",
    "keep the other entries",
    "it is for tensors",
    "torch's functions of one TensorDict",
    "Arithmetic works under `torch.vmap`",
    "is over its elements",
    "Structured arrays are read",
    "locked again, also when its body raised",
    "one index takes together",
    "The batch size of an empty TensorDict counts",
    "a False mask in a tuple",
    "are a nested tensor; there torch's error",
    "`NonTensorData.where` chooses",
    "one value and rows of values never differ",
    "is ignored where missing keys are",
    "can be viewed, split and chunked",
    "Values per row move with their rows",
    "of memory-mapped data, without a folder",
    "write texts and other values, too",
    "leaves integers buffers",
    "there `view(5)` of twelve rows",
    "Shape methods of a `NonTensorStack` give",
]
"""The phrases of claims that the peer adopted in 0.15, of which the page says so."""
