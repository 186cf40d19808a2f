"""What the router counts of itself, by the address of each server behind it, as families of metrics."""

from collections import Counter
from collections.abc import Iterator

from keepsight.observe.totals import Family
from keepsight.scaleout.choose_replica import ChosenBy
from keepsight.scaleout.replica import Replica
from keepsight.scaleout.replicas import Replicas


class RouterMeter:
    def __init__(self) -> None:
        self._requests = Counter[tuple[str, ChosenBy]]()
        self._retries = Counter[str]()

    def note_sent(self, replica: Replica, chosen_by: ChosenBy) -> None:
        self._requests[replica.address, chosen_by] += 1

    def note_retry(self, replica: Replica) -> None:
        """Called if a request has to be sent elsewhere. `replica`: where it was not answered."""
        self._retries[replica.address] += 1

    def families(self, replicas: Replicas) -> Iterator[Family]:
        yield Family(
            "keepsight_router_requests_total",
            "counter",
            "Requests sent to a replica, by what it was chosen for.",
            {
                (("replica", address), ("chosen_by", chosen_by)): [float(num)]
                for (address, chosen_by), num in self._requests.items()
            },
        )
        yield Family(
            "keepsight_router_retries_total",
            "counter",
            "Requests that a replica did not answer, as its connection failed or it had no room.",
            {(("replica", address),): [float(num)] for address, num in self._retries.items()},
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
