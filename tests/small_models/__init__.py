"""Provide the small models that tests train, each layer once: start here before you write another one.

`parts`: embedding, attention, MLP and head in fp64; most models consist of these. `tuples`: models that hand tuples on,
return or report losses of their own. `mixers`: layers with a state, attention with options. `experts`: routed experts
with auxiliary losses. `faulty`: layers that cannot be sliced. `unmodified`: models of users, in plain torch. The models
of `tests/zoo` are made of these.
"""
