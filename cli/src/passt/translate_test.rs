use clap::Parser as _;

use super::*;
use crate::config;

fn translated(passt: &str, own: &str) -> Result<Vec<String>, String> {
    let words = ["passt"].into_iter().chain(passt.split_whitespace());
    let args = PasstArgs::try_parse_from(words).map_err(|e| e.to_string())?;
    let own: Vec<_> = own.split_whitespace().collect();
    let flags = flags(&args, &own).map_err(|e| e.to_string())?;
    Ok(flags
        .into_iter()
        .map(|flag| flag.into_string().unwrap())
        .collect())
}

/// The configuration that the translated flags mean.
fn config_of(passt: &str, own: &str) -> slipgate_broker::SocketConfig {
    use clap::{CommandFactory as _, FromArgMatches as _};
    let flags = translated(passt, own).unwrap();
    let all = ["slipgate".to_owned()].into_iter().chain(flags);
    let matches = crate::args::CommandLine::command()
        .try_get_matches_from(all)
        .unwrap();
    let line = crate::args::CommandLine::from_arg_matches(&matches).unwrap();
    let crate::args::Command::Attach(args) = line.command else {
        panic!("another command");
    };
    config::attach_socket(&args, crate::rules_of("attach", &matches)).unwrap()
}

#[test]
fn libvirts_command_line_is_a_guest_at_a_socket() {
    // As libvirt writes it, with everything that a domain may say.
    let config = config_of(
        "--one-off --socket /run/libvirt/qemu/passt/1-web-net0.socket --pid /run/p.pid --mtu 9000 \
         --interface eth0 --log-file /var/log/passt.log --address 172.17.2.5 --netmask 16 \
         --tcp-ports 127.0.0.1/2022-2023:22-23,8080 --udp-ports 5353:53",
        "",
    );
    assert_eq!(config.nat.vms[0].name, "1-web-net0");
    assert_eq!(
        config.nat.vms[0].ip,
        "172.17.2.5".parse::<Ipv4Addr>().unwrap()
    );
    assert_eq!(config.nat.network.prefix_len, 16);
    assert_eq!(config.nat.network.mtu, Some(9_000));
    // An address is that of all ports behind it; without one they are of both families.
    assert_eq!(config.nat.forwards.len(), 3 + 2);
    assert_eq!(config.pid_file, Some("/run/p.pid".into()));
    let slipgate_broker::GuestSocket::At { is_for_one, .. } = config.socket else {
        panic!("no socket");
    };
    assert!(is_for_one);
    let rings = translated("--one-off --socket a.socket --vhost-user", "").unwrap();
    assert!(
        rings.contains(&"--vhost-user=a.socket".to_owned()),
        "{rings:?}"
    );
}

#[test]
fn muvms_command_line_is_a_connected_guest() {
    let config = config_of(
        "-q -f --fd 7 -t 10.1.2.3/3334-3334:80-80 -u 53-53:53-53",
        "",
    );
    assert_eq!(config.socket, slipgate_broker::GuestSocket::Inherited(7));
    assert_eq!(config.nat.forwards.len(), 1 + 2);
}

#[test]
fn options_that_may_be_given_twice_are_all_passed_on() {
    let flags = translated("-s a -D 9.9.9.9 -D 1.1.1.1 -t 80 -t 81:82 -u 53", "").unwrap();
    for flag in [
        "--dns=9.9.9.9",
        "--dns=1.1.1.1",
        "--forward=tcp:80:80",
        "--forward=tcp:81:82",
        "--forward=udp:53:53",
    ] {
        assert!(flags.iter().any(|given| given == flag), "{flag}: {flags:?}");
    }
}

#[test]
fn ports_that_are_left_out_are_none_of_the_forwards() {
    let forwards = |spec: &str| {
        let flags = translated(&format!("-s a -u {spec}"), "").unwrap();
        let forwards = flags
            .iter()
            .filter_map(|flag| flag.strip_prefix("--forward=udp:"));
        forwards.map(str::to_owned).collect::<Vec<_>>()
    };
    // The example of libvirt's documentation, without its device.
    assert_eq!(
        forwards("1.2.3.4/5000-5020:6000-6020,~5010-5015"),
        ["1.2.3.4:5000-5009:6000-6009", "1.2.3.4:5016-5020:6016-6020"]
    );
    assert_eq!(forwards("~80,79-81,90"), ["79:79", "81:81", "90:90"]);
    assert_eq!(forwards("80-90,~80-84,~86-90"), ["85:85"]);
    assert_eq!(forwards("65534-65535:1-2,~65535"), ["65534:1"]);
    assert_eq!(forwards("1-3,~0-1"), ["2-3:2-3"]);
    assert_eq!(forwards("80,90,~80-89"), ["90:90"]);
}

#[test]
fn slipgates_own_flags_come_last_and_win() {
    let own = "--default deny --allow *.example.com --ipv6 off --mtu=1400 --name web";
    let flags = translated("-f -s /run/a.socket -m 65520 -D 9.9.9.9", own).unwrap();
    assert!(
        !flags
            .iter()
            .any(|flag| flag == "--mtu=65520" || flag == "--ipv6=auto")
    );
    let once = config_of("-s /run/a.socket -1", "--one-off").socket;
    assert!(
        matches!(once, slipgate_broker::GuestSocket::At { is_for_one, .. } if is_for_one),
        "{once:?}"
    );
    let link = |passt, own| config_of(passt, own).socket;
    assert_eq!(
        link("-s /run/a.socket", "--fd 7"),
        slipgate_broker::GuestSocket::Inherited(7)
    );
    let rings = link("-F 7", "--vhost-user /run/b.socket");
    assert!(
        matches!(&rings, slipgate_broker::GuestSocket::At { flag, .. } if *flag == "--vhost-user"),
        "{rings:?}"
    );
    let config = config_of("-f -s /run/a.socket -m 65520 -D 9.9.9.9", own);
    assert_eq!(config.nat.network.mtu, Some(1_400));
    assert_eq!(config.nat.vms[0].name, "web");
}

#[test]
fn a_network_has_a_gateway_that_is_not_the_guest() {
    let gateway = |guest: &str, prefix| gateway_of(guest.parse().unwrap(), prefix).to_string();
    assert_eq!(gateway("192.168.7.9", 24), "192.168.7.2");
    assert_eq!(gateway("192.168.7.2", 24), "192.168.7.4");
    assert_eq!(gateway("192.168.7.3", 24), "192.168.7.4");
    assert_eq!(gateway("192.168.7.130", 25), "192.168.7.132");
    // A network of two hosts.
    assert_eq!(gateway("10.0.0.1", 30), "10.0.0.2");
    assert_eq!(gateway("10.0.0.2", 30), "10.0.0.1");
    assert_eq!(gateway("255.255.255.254", 30), "255.255.255.253");
    assert_eq!(gateway("255.255.255.250", 29), "255.255.255.252");
}

#[test]
fn what_slipgate_has_not_is_refused_by_its_option() {
    for (passt, words) in [
        ("-s a -t all", "--tcp-ports all"),
        ("-s a -t auto", "ports that are named"),
        ("-s a -u ~53", "--udp-ports"),
        ("-s a -u 53,~50-60", "all of its ports"),
        ("-s a -u 53,~x", "not a port"),
        ("-s a -u 60-50", "not a port"),
        ("-s a -u 50-60:50-51", "not as many"),
        ("-s a -t 10.0.0.1%eth0/80", "device"),
        ("-s a -t x/80", "not an address"),
        ("-s a -t 80-", "not a port"),
        ("-s a -a fd00::1", "IPv6"),
        ("-s a -a 10.0.0.1 -a 10.0.0.2", "second"),
        ("-s a -a 10.0.0.1 -n 255.0.255.0", "--netmask"),
        ("-s a -n 31", "--netmask"),
        ("-s a -a 10.0.0.2/31", "--address 31"),
        ("-s a -a 255.255.255.255/32", "--address 32"),
        ("-s a -a 10.0.0.2/99", "--address 99"),
        ("-s a -a 10.0.0.2/x", "--address x"),
        ("-s a --fd 3", "cannot be used with"),
        ("-f", "--socket"),
        ("-s a --no-map-gw", "--no-map-gw"),
    ] {
        let refused = translated(passt, "").unwrap_err();
        assert!(refused.contains(words), "{passt}: {refused}");
    }
    let none = translated("-s a -t none -u none -1", "").unwrap();
    assert!(!none.iter().any(|flag| flag.starts_with("--forward")));
    assert!(none.contains(&"--one-off".to_owned()));
}
