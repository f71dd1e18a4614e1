"""Data movement and scoring over the paged cache; today the torch references, on any device.

Shapes: ``kv_cache [num_blocks, Lb, 2, B, Hb, D]`` as in ``KVLayout.cache_shape`` (Lb layers and Hb
KV heads per block). A *slot* is ``block * B + offset``. Block 0 takes what nobody wants.
"""
