"""Names of media items and cache entries, as caches and tiers expect them."""

from hashlib import blake2b


def name_of(number: int) -> str:
    return blake2b(str(number).encode(), digest_size=32).hexdigest()
