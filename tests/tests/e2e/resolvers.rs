//! Each policy's questions go to its own resolvers, from one reload to the next.

use std::{fs, net::Ipv4Addr, path::Path};

use slipgate_testbed::{
    GuestConfig, WorldConfig,
    clients::dns,
    dns_wire::Record,
    require_root_and_tun,
    servers::{Answer, DnsServer, Zone},
    world::{SERVER, SERVER_2},
};

use crate::{DNS, Stand, WAIT, at};

const NAME: &str = "www.example.test";
/// Address of `NAME` according to each of two resolvers.
const TOLD: [Ipv4Addr; 2] = [
    Ipv4Addr::new(198, 51, 100, 1),
    Ipv4Addr::new(198, 51, 100, 2),
];
const REFUSED: u8 = 5;

/// Writes a policy file with the resolvers of the first and of the second VM, in TOML.
fn write(file: &Path, resolvers: [&str; 2]) {
    let [one, two] = resolvers;
    let text = format!(
        r#"
[vms]
tap0 = "one"
tap1 = "two"
[policy.one]
default = "allow"
dns.resolvers = {one}
[policy.two]
default = "allow"
dns.resolvers = {two}
"#
    );
    fs::write(file, text).unwrap();
}

/// Response code and address that each VM gets.
fn told(stand: &Stand) -> [(u8, Option<Ipv4Addr>); 2] {
    [&stand.guest, &stand.neighbours[0]].map(|guest| {
        let found = guest.run(|| dns::query_udp(at(DNS, 53), NAME, WAIT));
        let reply = found.unwrap().reply;
        (reply.code, reply.records.first().and_then(Record::address))
    })
}

#[test]
fn each_policy_has_its_own_resolvers_and_apply_changes_them() {
    require_root_and_tun!();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("egress.toml");
    let [one, two] = [SERVER, SERVER_2].map(|address| format!("[\"{address}\"]"));
    write(&file, [&one, &two]);
    let neighbours = [GuestConfig::new("tap1")];
    let args = ["--policy", file.to_str().unwrap()];
    let world = WorldConfig::default();
    let stand = Stand::beside(world, GuestConfig::new("tap0"), &neighbours, &args);
    let resolvers = [(SERVER, TOLD[0]), (SERVER_2, TOLD[1])].map(|(address, told)| {
        let zone = Zone::from([(NAME.into(), Answer::a(told, 300))]);
        DnsServer::start(&stand.world.net, (address, 53), zone).unwrap()
    });
    let asked = || [0, 1].map(|i: usize| resolvers[i].udp_queries(NAME));
    let [first, second] = TOLD.map(|address| (0, Some(address)));

    for _ in 0..2 {
        assert_eq!(told(&stand), [first, second]);
        assert_eq!(asked(), [1, 1], "the second time from the cache");
    }
    write(&file, [&two, &one]);
    stand.slipgate.run(&["policy", "apply"]).unwrap();
    assert_eq!(told(&stand), [second, first]);
    assert_eq!(asked(), [2, 2]);
    // Without DNS, and with it again: nothing of that is settled at the start.
    write(&file, ["\"none\"", &one]);
    stand.slipgate.run(&["policy", "apply"]).unwrap();
    assert_eq!(told(&stand), [(REFUSED, None), first]);
    let asked_for = |name: &str| stand.slipgate.why("tap0", name, "udp").unwrap();
    let (admitted, why) = asked_for("203.0.113.10:53");
    assert!(!admitted && why.contains("[one] resolvers none"), "{why}");
    let (admitted, why) = asked_for(&format!("{NAME}:443"));
    assert!(
        !admitted && why.contains("every question is answered REFUSED"),
        "{why}"
    );
    assert_eq!(asked(), [2, 2], "what an unchanged policy has cached stays");
    write(&file, [&one, &one]);
    stand.slipgate.run(&["policy", "apply"]).unwrap();
    assert_eq!(told(&stand), [first, first]);
    assert_eq!(asked(), [3, 2]);
}
