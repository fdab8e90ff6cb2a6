//! Devices that a kernel under the end-to-end tests need not have, and Debian's have as modules.

/// Their modules.
pub const DEVICE_MODULES: [&str; 4] = ["8021q", "macvlan", "wireguard", "vrf"];

/// Bodies of end-to-end tests that need one of them. Where the kernel lacks it they leave out what needs
/// it; all of them run in hybrid mode's cells on Debian's kernels.
pub const DEVICE_TESTS: [&str; 5] = [
    "egress_devices::a_policy_names_a_vlan_as_uplink_beside_the_device_under_it",
    "egress_devices::a_policy_names_a_macvlan_as_uplink_beside_the_device_under_it",
    "egress_devices::a_policy_leads_into_a_wireguard_tunnel",
    "egress_routes::flows_of_a_policy_leave_by_its_vrf",
    "host_routes::a_rule_leads_to_a_vrf",
];
