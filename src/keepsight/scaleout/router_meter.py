"""What the router counts of itself, by the address of each server behind it, as families of metrics.

Series are there from the start, at 0: Prometheus sees no increase in one that begins at 1.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import get_args

from keepsight.errors import AnsweredError, EngineLostError, NoReplicaError
from keepsight.observe.totals import Family
from keepsight.scaleout.choose_replica import ChosenBy
from keepsight.scaleout.replica import Replica
from keepsight.scaleout.replicas import Replicas


class RouterMeter:
    def __init__(self) -> None:
        self._requests = Counter[tuple[str, ChosenBy]]()
        self._retries = Counter[str]()
        self._refusals = Counter(dict.fromkeys((str(NoReplicaError.code), str(EngineLostError.code)), 0))

    def note_sent(self, replica: Replica, chosen_by: ChosenBy) -> None:
        self._requests[replica.address, chosen_by] += 1

    def note_retry(self, replica: Replica) -> None:
        """Called if a request has to be sent elsewhere. `replica`: where it was not answered."""
        self._retries[replica.address] += 1

    def note_refusal(self, error: AnsweredError) -> None:
        self._refusals[str(error.code)] += 1

    def families(self, replicas: Replicas) -> Iterator[Family]:
        addresses = [each.address for each in replicas.all]
        requests = dict.fromkeys(itertools.product(addresses, get_args(ChosenBy)), 0) | self._requests
        yield Family(
            "keepsight_router_requests_total",
            "counter",
            "Requests sent to a replica, by what it was chosen for.",
            {
                (("replica", address), ("chosen_by", chosen_by)): [float(num)]
                for (address, chosen_by), num in requests.items()
            },
        )
        yield Family(
            "keepsight_router_retries_total",
            "counter",
            "Requests that a replica did not answer, as its connection failed or it had no room.",
            {
                (("replica", address),): [float(num)]
                for address, num in (dict.fromkeys(addresses, 0) | self._retries).items()
            },
        )
        yield Family(
            "keepsight_router_refusals_total",
            "counter",
            "Requests that the router refused itself, by the error's code.",
            {(("code", code),): [float(num)] for code, num in self._refusals.items()},
        )
        yield Family(
            "keepsight_router_requests_in_flight",
            "gauge",
            "Requests that a replica is answering.",
            {(("replica", each.address),): [float(each.num_requests)] for each in replicas.all},
        )
        yield Family(
            "keepsight_router_replica_ready",
            "gauge",
            "Whether a replica is ready for requests.",
            {(("replica", each.address),): [float(each.is_ready)] for each in replicas.all},
        )
