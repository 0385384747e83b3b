"""What a person does about a problem: worded once for the log, `fedcg doctor`, `fedcg agent status` and the coordinator's page."""

from __future__ import annotations

COHORT_ADVICE = (
    "On the device that differs: stop the agent, `fedcg cohort join --config AGENT.TOML` with the code of `fedcg cohort create` on the "
    "first one, start the agent. One that has trained, or has another secret, needs an empty store before `join`: `mv STORE STORE.before`. "
    "Its private networks begin anew then"
)
DECLINE_ADVICE = {
    "upload_not_allowed": "the device's owner approves it with `fedcg agent approve`, or allows the part under [policy] allow_upload in agent.toml",
    "report_not_allowed": "the device's owner approves it with `fedcg agent approve`, or allows the field under [policy] allow_report in agent.toml",
    "not_eligible": "nothing, if it has trained this round already; otherwise `fedcg doctor --hardware` on the device names the reason: disk, temperature, power, memory or the hours of its schedule",
    "no_data": "put images where [data] root in the device's agent.toml names them; `fedcg doctor` there shows what it finds",
    "unknown_method": "update the agent on the device, or install the method's package there",
    "spec_refused": "the log of the device names what it refuses in the spec; `fedcg doctor` there shows its own bounds ([policy])",
    "training_failed": "`fedcg agent status` on the device names the cause: memory, disk or private store; `fedcg doctor` there tries a short training",
    "diverged": "look at the device's images: wrong labels, or an empty class; where several devices diverge: `fedcg federation continue PLAN {federation}`, with a lower learning rate",
    "withheld": "its owner decides: the gate of [audit] or the budget of [privacy] held it back; `fedcg agent status` there names it",
    "paused": "nothing: its owner paused it; `fedcg agent resume` on the device ends that",
    "needs_approval": "the device's owner looks with `fedcg agent approve` at what the spec asks for, beyond [policy] in agent.toml",
    "daily_limit": "nothing: it takes part again after midnight UTC; [policy] max_upload_mb_per_day and max_download_mb_per_day there set the limit",
    "interrupted": "nothing: its agent was stopped, and takes part again when it runs",
    "reserved": "nothing: the device's application keeps it busy, and releases its lock_file or stop_file when it is done",
    "serving": "nothing: its inference server is busy, and it trains when fewer requests come; [eligibility] max_requests_per_s there sets the limit",
    "hot": "nothing, if it is rare: it takes part when it has cooled; otherwise improve its cooling or lower its power mode",
    "throttled": "look at the device's power supply and cooling: one of them slows it down",
    "on_battery": "connect the device to mains power, or set on_mains = false under [eligibility] in its agent.toml",
    "power_mode": "set a power mode on the device (`sudo nvpmodel -m ID`) that [eligibility] power_modes in its agent.toml lists",
    "quiet_hours": "nothing: it takes part when its quiet hours are over; [eligibility] quiet_hours there has the spans",
    "low_disk": "free some space on the device, or lower [eligibility] min_free_disk_mb in its agent.toml",
    "low_memory": "end other programs on the device, or lower [eligibility] min_free_memory_mb in its agent.toml",
    "metered": "nothing: it takes part when it has a link that is not metered; [eligibility] metered_interfaces there names those that are",
    "no_time": "give rounds more time: `fedcg federation set {federation} deadline_s=SECONDS` at the coordinator",
}
"""What a person does about a device that declines, by its reason; `{federation}` stands for the id of the federation."""

REVOKED_ADVICE = (
    "the coordinator has revoked this device; to take part again, it is enrolled anew with a token of the operator: "
    "`fedcg token create --replaces DEVICE`"
)
