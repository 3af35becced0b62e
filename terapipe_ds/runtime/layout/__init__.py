"""Know which part of the layers is where: cut the module, move layers, tied and copied weights."""
