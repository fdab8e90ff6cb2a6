//! Each policy's questions go to its own resolvers, from one reload to the next.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::Path,
};

use slipgate_testbed::{
    GuestConfig, WorldConfig,
    clients::dns,
    dns_wire::{Record, types},
    servers::{Answer, DnsServer, Zone},
    world::{SERVER, SERVER_2},
    world_ipv6::{SERVER6, SERVER6_2},
};

use crate::{
    Cell, DNS, Stand, WAIT,
    matrix::{at, matrix},
};

matrix! {
    each_policy_has_its_own_resolvers_and_apply_changes_them: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its two VMs share a process; a socket has one guest";
    a_resolver_of_ipv6_alone_serves_guests_of_both_families: [hybrid_ipv6, user_ipv6],
        without [hybrid_ipv4, user_ipv4]: "a host without IPv6 reaches no such resolver; the guest asks by both";
}

const NAME: &str = "www.example.test";
/// The resolvers of the policies, which are of IPv4 whatever the guests are.
const RESOLVERS: [Ipv4Addr; 2] = [SERVER, SERVER_2];
const REFUSED: u8 = 5;

fn a_resolver_of_ipv6_alone_serves_guests_of_both_families(cell: Cell) {
    const LONG: &str = "long.example.test";
    // At the first two of the list, one of each family, nobody listens.
    let (nobody, nobody6) = (format!("{SERVER}:5353"), format!("[{SERVER6}]:5353"));
    let resolver = SERVER6_2.to_string();
    let args = ["--dns", &nobody, "--dns", &nobody6, "--dns", &resolver];
    let stand = Stand::of(cell, &args);
    let (v4, v6) = (
        "198.51.100.1".parse().unwrap(),
        "2001:db8:ab::1".parse().unwrap(),
    );
    let records: Vec<_> = [v4, v6]
        .map(|ip: IpAddr| Record::of_address(ip, 300))
        .into();
    let zone = Zone::from([
        (NAME.into(), Answer::records(records.clone())),
        (LONG.into(), Answer::records(records).truncated()),
    ]);
    let resolver = DnsServer::start(&stand.world.net, (SERVER6_2, 53), zone).unwrap();
    let told = |server: IpAddr, kind, name: &str| {
        let ask = || dns::ask_udp(at(server, 53), &dns::question(name, kind), WAIT);
        let records = stand.guest.run(ask).unwrap().reply.records;
        records.first().and_then(Record::ip)
    };
    assert_eq!(told(DNS.into(), types::A, NAME), Some(v4));
    assert_eq!(told(cell.dns(), types::AAAA, NAME), Some(v6));
    assert_eq!(
        (resolver.udp_queries(NAME), resolver.tcp_queries(NAME)),
        (2, 0)
    );
    // By TCP what is cut.
    assert_eq!(told(cell.dns(), types::AAAA, LONG), Some(v6));
    assert_eq!(
        (resolver.udp_queries(LONG), resolver.tcp_queries(LONG)),
        (1, 1)
    );
}

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
fn told(stand: &Stand) -> [(u8, Option<IpAddr>); 2] {
    [&stand.guest, &stand.neighbours[0]].map(|guest| {
        let (server, question) = (at(stand.cell.dns(), 53), stand.cell.question(NAME));
        let found = guest.run(|| dns::ask_udp(server, &question, WAIT));
        let reply = found.unwrap().reply;
        (reply.code, reply.records.first().and_then(Record::ip))
    })
}

fn each_policy_has_its_own_resolvers_and_apply_changes_them(cell: Cell) {
    // The name's address by each of them.
    let addresses = ["198.51.100.1", "198.51.100.2"];
    let addresses6 = ["2001:db8:ab::1", "2001:db8:ab::2"];
    let addresses = if cell.is_ipv6() {
        addresses6
    } else {
        addresses
    };
    let addresses: [IpAddr; 2] = addresses.map(|text| text.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("egress.toml");
    let [one, two] = RESOLVERS.map(|address| format!("[\"{address}\"]"));
    write(&file, [&one, &two]);
    let neighbours = [GuestConfig::new("tap1")];
    let args = ["--policy", file.to_str().unwrap()];
    let world = WorldConfig::default();
    let stand = Stand::of_several(cell, world, &[], &neighbours, &args);
    let resolvers = [0, 1].map(|i: usize| {
        let zone = Zone::from([(NAME.into(), Answer::address(addresses[i], 300))]);
        DnsServer::start(&stand.world.net, (RESOLVERS[i], 53), zone).unwrap()
    });
    let asked = || [0, 1].map(|i: usize| resolvers[i].udp_queries(NAME));
    let [first, second] = addresses.map(|address| (0, Some(address)));

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
    let (admitted, why) = asked_for(&at(cell.server(), 53).to_string());
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
