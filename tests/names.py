"""Names of media and of entries, as caches and tiers take them."""

from hashlib import blake2b


def name_of(number: int) -> str:
    return blake2b(str(number).encode(), digest_size=32).hexdigest()
