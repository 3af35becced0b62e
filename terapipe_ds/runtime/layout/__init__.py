"""Know the place of each part of the layers: cut the module, move layers, handle tied and copied weights."""
