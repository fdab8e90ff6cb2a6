//! Settings of the host that break guests' IPv6 are reported at the start.
use slipgate_abi::Handover;
use slipgate_testbed::{
    Guest, GuestConfig, NetNs, PinDir, Result, Slipgate, World, require_root_and_tun, world::UPLINK,
};

use super::scene::*;

struct Served {
    slipgate: Slipgate,
    _guest: Guest,
    _pins: PinDir,
    _world: World,
}

/// Starts on a host that was prepared so.
fn serve(prepare: impl Fn(&NetNs), flags: &[&str]) -> Result<Served> {
    let world = World::new()?;
    give_world(&world);
    prepare(&world.host);
    let guest = Guest::new(&world, GuestConfig::new("tap0"))?;
    let pins = PinDir::new()?;
    let args = ["--tap", "tap0", "--uplink", UPLINK];
    let slipgate = Slipgate::attach(&world.host, &pins, &[&args, flags].concat())?;
    Ok(Served {
        slipgate,
        _guest: guest,
        _pins: pins,
        _world: world,
    })
}

fn masquerades6(host: &NetNs) {
    let rules = format!(
        "add table ip6 own\n\
         add chain ip6 own out {{ type nat hook postrouting priority 100 ; }}\n\
         add rule ip6 own out oifname {UPLINK} masquerade"
    );
    host.nft(&rules).unwrap();
}

#[test]
fn ipv6_addresses_are_not_shared_with_masquerading_unless_asked() {
    require_root_and_tun!();
    let refused = serve(masquerades6, &["--ipv6", "nat"]).err().unwrap();
    for part in ["--host-nat", "own out", "IPv6 flows"] {
        assert!(
            refused.to_string().contains(part),
            "{refused}\n  not {part}"
        );
    }
    let share = ["--ipv6", "nat", "--host-nat", "share"];
    let said = serve(masquerades6, &share).unwrap().slipgate.stderr();
    assert!(said.contains("own out"), "{said}");
    // Of no concern to guests that have IPv4 alone.
    assert!(serve(masquerades6, &[]).is_ok());
}

#[test]
fn ipv6_of_an_uplink_with_big_tcp_comes_with_a_warning() {
    require_root_and_tun!();
    let joins = |host: &NetNs| {
        let set = format!("link set {UPLINK} gro_max_size 185000");
        host.ip(&set).unwrap();
    };
    let remedy = format!("ip link set dev {UPLINK} gro_max_size 65536");
    for (flags, is_warned) in [(&["--ipv6", "nat"][..], true), (&[], false)] {
        let said = serve(joins, flags).unwrap().slipgate.stderr();
        assert_eq!(said.contains(&remedy), is_warned, "{said}");
    }
}

#[test]
fn ipv6_handovers_are_logged_by_the_logging_build() {
    require_root_and_tun!();
    let stand = stand6(&["--bpf-log", "--log", "debug"]);
    // Neighbour discovery is IPv6's alone.
    stand.says(&format!("why {} flags", Handover::Ndp as u8));
}
