"""Which part of the layers is where: cutting the module, moving layers, tied and copied weights."""
