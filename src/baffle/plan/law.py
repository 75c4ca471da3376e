"""Plans whose scalars are drawn from their law (`baffle.core.law`): what the law covers, and what is refused."""

from baffle.errors import PlanError
from baffle.plan.plan import Plan

DRAWN = (
    'estimator = "law": the scalars of this run are drawn, not probed; its accuracy is what K directions would reach '
    "in law, its passes and seconds are those of backpropagation, and say nothing about the cost of probes"
)


def check_law(plan: Plan) -> None:
    """Raise a PlanError for settings that the law of an estimate does not cover."""
    if plan.estimator != "law":
        return
    probe, secure = plan.probe, plan.secure
    refused = (
        (probe.distribution != "gaussian", "probe.distribution", "covers Gaussian directions", 'set it to "gaussian"'),
        (probe.supports == "auto", "probe.supports", 'has no cost of probes that "auto" could go by', "name a kind"),
        (probe.precision != "float32", "probe.precision", "covers exact scalars, not rounded ones", ""),
        (probe.memory_mb > 0, "probe.memory_mb", "backpropagates, which keeps all activations", ""),
        (probe.stacked, "probe.stacked", "has no probes to share", ""),
        (bool(plan.federation.tiers), "federation.tiers", "gives every client all K directions", ""),
        (secure.combine == "median", "secure.combine", "covers means of scalars, not medians", ""),
        (secure.group_seeds == "own", "secure.group_seeds", "covers directions that all groups share", ""),
        (plan.privacy.on, "privacy", "would add noise to gradients instead of scalars", ""),
    )
    for is_set, key, reason, remedy in refused:
        if is_set:
            raise PlanError(f'{key}: estimator = "law" {reason}; {remedy or "leave it out"}, or probe')
