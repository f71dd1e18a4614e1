"""Attention, data movement and scoring over the paged cache, a folder for each verb: Triton on a
GPU, C++ on a CPU, torch elsewhere.

Shapes: ``kv_cache [num_blocks, Lb, 2, B, Hb, D]`` as in ``KVLayout.cache_shape`` (Lb layers and Hb
KV heads per block). A *slot* is ``block * B + offset``. Block 0 is the null block: what is written
there is not used. For a kernel ``name``, ``name_torch`` is the reference, ``name_cpu`` the call of
its C++ and ``name_triton`` the launcher; ``name`` picks by device.
"""
