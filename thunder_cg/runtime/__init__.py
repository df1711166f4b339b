"""The run time: the only place with state, and ``cuda.py`` the only module that calls into CUDA."""
