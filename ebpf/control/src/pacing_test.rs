use slipgate_abi::VmRow;

use super::*;
use crate::{
    attach::Hook,
    device::Device,
    serve::serve_pacer,
    testing::{datapath, in_netns, make_tap, run},
};

#[test]
fn a_taps_queue_is_shaped_and_given_back() {
    in_netns("a_taps_queue_is_shaped_and_given_back", || {
        let tap = make_tap("t0");
        let before = run("tc qdisc show dev t0");
        assert!(shape_tap(tap, 12_500_000).unwrap());
        let queue = run("tc qdisc show dev t0");
        assert!(queue.contains("htb 5347: root"), "{queue}");
        assert!(queue.contains("default 0x1"), "{queue}");
        // As many of the shortest frames as the limit lets wait in 20 ms, and 1,000.
        assert!(queue.contains("limit 8428p"), "{queue}");
        let class = run("tc -s class show dev t0");
        // 100 Mb/s of full packets with their Ethernet headers, and a thousandth.
        assert!(class.contains("rate 101034Kbit"), "{class}");
        // Another rate changes the class in place.
        assert!(shape_tap(tap, 125_000).unwrap());
        let class = run("tc class show dev t0");
        assert!(class.contains("rate 1010Kbit"), "{class}");
        let queue = run("tc qdisc show dev t0");
        assert!(queue.contains("limit 1988p"), "{queue}");
        unshape_tap(tap).unwrap();
        assert_eq!(run("tc qdisc show dev t0"), before);
        unshape_tap(tap).unwrap();
    });
}

#[test]
fn somebody_elses_queue_stays() {
    in_netns("somebody_elses_queue_stays", || {
        let tap = make_tap("t0");
        run("tc qdisc add dev t0 root handle 7: tbf rate 1mbit burst 10kb latency 50ms");
        let before = run("tc qdisc show dev t0");
        assert!(!shape_tap(tap, 12_500_000).unwrap());
        unshape_tap(tap).unwrap();
        assert_eq!(run("tc qdisc show dev t0"), before);
    });
}

#[test]
fn the_pacing_device_is_as_it_must_be_and_is_reopened() {
    in_netns("the_pacing_device_is_as_it_must_be_and_is_reopened", || {
        let datapath = datapath();
        let pacer = PacingDevice::open(3).unwrap();
        serve_pacer(&datapath, &pacer, Hook::Tcx).unwrap();
        let row = VmRow::new(7);
        pacer.shape(row, 1_250_000).unwrap();
        let class = run("tc class show dev sgpace3");
        assert!(class.contains("htb 5347:7"), "{class}");
        assert_eq!(PacingDevice::open(3).unwrap(), pacer);
        let shown = run("ip -d link show sgpace3");
        for part in ["NOARP", "UP", "mtu 65535", "veth"] {
            assert!(shown.contains(part), "`{part}` in: {shown}");
        }
        assert_eq!(run("ip -6 addr show dev sgpace3").trim(), "");
        pacer.unshape(row).unwrap();
        assert_eq!(run("tc class show dev sgpace3"), "");
        // The device of the name is another's.
        run("ip link add sgpace4 type bridge");
        assert!(PacingDevice::open(4).is_err());
        assert!(!PacingDevice::remove(4).unwrap());
        assert!(PacingDevice::remove(3).unwrap());
        assert!(Device::named("sgpaced3").is_err());
        assert!(!PacingDevice::remove(3).unwrap());
    });
}

#[test]
fn an_attempt_leaves_nothing() {
    in_netns("an_attempt_leaves_nothing", || {
        let before = run("ip link");
        try_shaping().unwrap();
        assert_eq!(run("ip link"), before);
        assert_eq!(
            run("tc qdisc show dev lo").trim(),
            "qdisc noqueue 0: root refcnt 2"
        );
    });
}
