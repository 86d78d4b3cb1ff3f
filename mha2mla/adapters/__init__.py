"""The signatures of other projects over this package's ops: a caller changes an import and nothing else.

``flash_mla``: FlashMLA's functions. ``dense``: caches as MHA2MLA's reference holds them, head-major and unpaged.
"""
