use super::*;
use crate::{
    attach::Hook,
    serve,
    testing::{datapath, in_netns, make_tap, run},
};

#[test]
fn a_tap_that_was_served_is_as_it_was_before() {
    in_netns("a_tap_that_was_served_is_as_it_was_before", || {
        let (datapath, index) = (datapath(), make_tap("t0"));
        let tap = Device::named("t0").unwrap();
        let shown = || {
            let sysctls = run("sysctl net.ipv4.conf.t0.forwarding net.ipv6.conf.t0.disable_ipv6");
            let is_up = !run("ip -brief link show dev t0 up").is_empty();
            (is_up, sysctls, tap.mtu().unwrap())
        };
        for (up, on) in [("up", 1), ("down", 0)] {
            run(&format!("ip link set t0 mtu 1400 {up}"));
            run(&format!("sysctl -qw net.ipv4.conf.t0.forwarding={on}"));
            run(&format!(
                "sysctl -qw net.ipv6.conf.t0.disable_ipv6={}",
                1 - on
            ));
            let (settings, before) = (TapSettings::of(&tap).unwrap(), shown());
            assert_eq!((before.0, before.2), (up == "up", 1_400));
            tap.set_up(false).unwrap();
            tap.set_mtu(9_000).unwrap();
            serve::serve_tap(&datapath, index, Hook::Tcx).unwrap();
            assert_ne!(shown(), before);
            serve::shut_tap(&datapath, index).unwrap();
            settings.restore(&tap).unwrap();
            assert_eq!(shown(), before);
            settings.down().restore(&tap).unwrap();
            assert_eq!(shown(), (false, before.1, before.2));
        }
    });
}
