use slipgate_ipc::client::VmDefinition;
use slipgate_policy::document::CliOverrides;

use super::*;
use slipgate_model::Ipv6Mode;

/// A configuration of VMs of these names, by what flags say of policies.
pub(crate) fn config(vms: &[&str], flags: CliOverrides) -> Config {
    let network = GuestNetwork {
        guest: Ipv4Addr::new(10, 0, 2, 15),
        gateway: Ipv4Addr::new(10, 0, 2, 2),
        dns: Ipv4Addr::new(10, 0, 2, 3),
        prefix_len: 24,
        mtu: None,
        ipv6: Ipv6Mode::Off,
        ipv6_prefix: "fd00::/64".parse().unwrap(),
        ipv6_pool: None,
    };
    let vm = |name: &&str| VmConfig::new(name, &format!("tap-{name}"), network.guest);
    let mut config = Config {
        mode: Mode::Auto,
        uplink: None,
        network,
        vms: vms.iter().map(vm).collect(),
        is_daemon: false,
        takes_over: false,
        metrics_labels: Vec::new(),
        flags,
        named_policies: Default::default(),
        base_file: None,
        forwards: Vec::new(),
        nat_ports: 61_000..=65_535,
        eim_ports: None,
        nat_address: None,
        flow_table: 65_536,
        max_vms: 4_096,
        max_rules: 4_096,
        pin_dir: "/sys/fs/bpf/slipgate".into(),
        flow_log: None,
        flow_log_events: Vec::new(),
        host_nat: HostNat::Refuse,
        metrics: None,
        api: Vec::new(),
        workers: 1,
        snapshot_dir: None,
        snapshots_max: 64,
        idle_after: 0,
        pcap: None,
        xdp: Xdp::Auto,
        bpf_log: false,
        on_exit: OnExit::Detach,
        new_vms: false,
    };
    config.settle().unwrap();
    config
}

#[test]
fn whether_a_vm_may_get_ipv6_is_known_at_the_start() {
    let mut config = config(&["one", "two"], CliOverrides::default());
    assert!(!config.may_have_ipv6());
    config.vms[1].ipv6 = Some(Ipv6Mode::Routed);
    assert!(config.may_have_ipv6() && !config.translates_ipv6());
    config.vms[1].ipv6 = Some(Ipv6Mode::Auto);
    assert!(config.translates_ipv6());
    assert!(config.may_have_ipv6());
    config.network.ipv6 = Ipv6Mode::Nat;
    config.vms[1].ipv6 = None;
    assert!(config.may_have_ipv6());
    config.network.ipv6 = Ipv6Mode::Off;
    assert!(!config.may_have_ipv6());
    config.is_daemon = true;
    assert!(config.may_have_ipv6(), "by its API");
    assert!(!config.wants_ipv6());
}

#[test]
fn a_single_address_that_is_not_routed_any_more_is_no_prefix() {
    let definition = |prefix: &str| VmDefinition {
        ipv6_prefix: Some(prefix.to_owned()),
        ..VmConfig::new("kept", "tap-kept", Ipv4Addr::new(10, 0, 2, 15)).definition()
    };
    let kept = |mode, prefix: &str| {
        let mut config = config(&[], CliOverrides::default());
        config.network.ipv6 = mode;
        config.serve_kept(&[definition(prefix)]).unwrap();
        config.vms[0].ipv6_prefix.map(|prefix| prefix.to_string())
    };
    let single = "2001:db8::17/128";
    assert_eq!(kept(Ipv6Mode::Routed, single).as_deref(), Some(single));
    assert_eq!(kept(Ipv6Mode::Nat, single), None);
    let prefix = "2001:db8:17::/64";
    assert_eq!(kept(Ipv6Mode::Nat, prefix).as_deref(), Some(prefix));
}
