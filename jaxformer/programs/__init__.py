"""The programs behind the command `jaxformer`, a file each; `jaxformer.__main__` lists them."""
