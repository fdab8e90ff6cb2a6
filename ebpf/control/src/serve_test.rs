use std::{
    fs::File,
    io::Write,
    os::fd::{AsFd as _, AsRawFd},
    sync::atomic::Ordering::{Acquire, Release},
    time::{Duration, Instant},
};

use super::*;
use crate::{
    Owner,
    attach::AttachedBy,
    bpf,
    maps::SharedMaps,
    netlink::NetworkWatch,
    probe,
    testing::{attached_at, datapath, in_netns, make_tap, run, vm_spec},
    vm::VmSpec,
};

fn update_until(watch: &mut NetworkWatch, what: impl Fn(&Network) -> bool) {
    for _ in 0..200 {
        watch.update().unwrap();
        if what(watch.network()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("no such change in two seconds: {:?}", watch.network());
}

fn tap_known(maps: &SharedMaps, ifindex: IfIndex) -> bool {
    maps.taps.get(&ifindex.get()).unwrap().is_some()
}

#[test]
fn a_tap_made_again_under_its_name_is_served_again() {
    for hook in [Hook::Tcx, Hook::Clsact] {
        serve_one_made_again(hook);
    }
}

fn serve_one_made_again(hook: Hook) {
    in_netns(
        "a_tap_made_again_under_its_name_is_served_again",
        move || {
            let datapath = datapath();
            let maps = datapath.maps();
            let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
            let tap = make_tap("t0");
            let vm = vm::open(
                maps,
                &owner,
                &VmSpec {
                    tap_ifindex: Some(tap),
                    ..vm_spec("a")
                },
            )
            .unwrap();
            serve_tap(&datapath, tap, hook).unwrap();
            let up = |name: &str| Device::named(name).unwrap().flags().unwrap() & libc::IFF_UP != 0;
            assert!(up("t0"));
            let mut watch = NetworkWatch::open().unwrap();
            let served = std::cell::RefCell::new(Served {
                vm_row: vm.row,
                tap: "t0".into(),
                ifindex: Some(tap),
                mtu: 1_500,
            });
            // As a broker keeps it.
            let follow = |watch: &NetworkWatch| {
                let mut served = served.borrow_mut();
                let changes = follow_taps(
                    &datapath,
                    watch.network(),
                    std::slice::from_ref(&*served),
                    hook,
                );
                for (_, change) in changes.as_ref().unwrap() {
                    match *change {
                        TapChange::Gone => served.ifindex = None,
                        TapChange::Again { ifindex } => served.ifindex = Some(ifindex),
                        TapChange::Mtu(mtu) => served.mtu = mtu,
                    }
                }
                changes
            };
            assert_eq!(follow(&watch).unwrap(), []);

            run("ip link set t0 mtu 1400");
            update_until(&mut watch, |network| {
                network
                    .link_by_name("t0")
                    .is_some_and(|link| link.mtu == 1_400)
            });
            assert_eq!(follow(&watch).unwrap(), [(vm.row, TapChange::Mtu(1_400))]);

            run("ip link del t0");
            update_until(&mut watch, |network| network.link_by_name("t0").is_none());
            assert_eq!(follow(&watch).unwrap(), [(vm.row, TapChange::Gone)]);
            assert!(!tap_known(maps, tap));
            assert_eq!(follow(&watch).unwrap(), []);
            assert_eq!(datapath.attached().unwrap(), [], "no defunct pin is left");

            let again = make_tap("t0");
            assert_ne!(again, tap);
            update_until(&mut watch, |network| network.link_by_name("t0").is_some());
            let change = TapChange::Again { ifindex: again };
            assert_eq!(follow(&watch).unwrap(), [(vm.row, change)]);
            assert!(tap_known(maps, again) && up("t0"));
            assert_eq!(attached_at("t0", Program::GuestEgress), 1);
            let row = maps.vm(vm.row).unwrap();
            assert_eq!(row.id().load(Acquire), vm.id.get());
            assert_eq!(row.tap_ifindex().load(Acquire), again.get());
        },
    );
}

/// The engine may write the row, and an attacker in it may write anything.
#[test]
fn what_a_row_says_of_its_tap_leads_to_nothing() {
    in_netns("what_a_row_says_of_its_tap_leads_to_nothing", || {
        let datapath = datapath();
        let maps = datapath.maps();
        let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
        let tap = make_tap("t0");
        let foreign = make_tap("foreign0");
        run("ip link set foreign0 up mtu 1234");
        let spec = VmSpec {
            tap_ifindex: Some(tap),
            ..vm_spec("a")
        };
        let vm = vm::open(maps, &owner, &spec).unwrap();
        serve_tap(&datapath, tap, Hook::Tcx).unwrap();
        let mut watch = NetworkWatch::open().unwrap();
        let served = |ifindex| {
            [Served {
                vm_row: vm.row,
                tap: "t0".into(),
                ifindex,
                mtu: 1_500,
            }]
        };
        let row = maps.vm(vm.row).unwrap();
        let follow = |watch: &NetworkWatch, ifindex| {
            follow_taps(&datapath, watch.network(), &served(ifindex), Hook::Tcx).unwrap()
        };
        for lie in [foreign.get(), 1, 0, 0xffff] {
            row.tap_ifindex().store(lie, Release);
            vm::set_mtu(maps, vm.row, 100);
            assert_eq!(follow(&watch, Some(tap)), [], "{lie}");
        }
        // Nor does a change pass unseen by a row that knows of it already.
        run("ip link del t0");
        update_until(&mut watch, |network| network.link_by_name("t0").is_none());
        row.tap_ifindex().store(0, Release);
        assert_eq!(follow(&watch, Some(tap)), [(vm.row, TapChange::Gone)]);
        let ifindex = make_tap("t0");
        update_until(&mut watch, |network| network.link_by_name("t0").is_some());
        row.tap_ifindex().store(ifindex.get(), Release);
        let again = [(vm.row, TapChange::Again { ifindex })];
        assert_eq!(follow(&watch, None), again);
        assert_eq!(attached_at("t0", Program::GuestEgress), 1);
        assert_eq!(attached_at("foreign0", Program::GuestEgress), 0);
        let flags = Device::named("foreign0").unwrap().flags().unwrap();
        assert_ne!(flags & libc::IFF_UP, 0);
    });
}

/// A cause that keeps a program from being attached may be gone at the next attempt.
#[test]
fn a_tap_that_can_not_be_served_is_left_down_and_without_program() {
    /// Longest chain of tcx programs (`BPF_MPROG_MAX`).
    const MOST_LINKS: usize = 64;
    in_netns(
        "a_tap_that_can_not_be_served_is_left_down_and_without_program",
        || {
            let datapath = datapath();
            let maps = datapath.maps();
            let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
            let spec = VmSpec {
                tap_ifindex: None,
                ..vm_spec("a")
            };
            let vm = vm::open(maps, &owner, &spec).unwrap();
            let tap = make_tap("t0");
            run("ip link set t0 up");
            // Each program is once in a chain.
            let link = |_| {
                let other = probe::pass_program().unwrap();
                bpf::link_create_tcx(other.as_fd(), tap, bpf::ChainPosition::First).ok()
            };
            let full: Vec<_> = (0..MOST_LINKS).map_while(link).collect();
            let mut watch = NetworkWatch::open().unwrap();
            let served = [Served {
                vm_row: vm.row,
                tap: "t0".into(),
                ifindex: None,
                mtu: 1_500,
            }];
            let mut follow = || {
                watch.update().unwrap();
                follow_taps(&datapath, watch.network(), &served, Hook::Tcx).unwrap()
            };
            assert_eq!(follow(), [(vm.row, TapChange::Gone)]);
            assert!(!tap_known(maps, tap));
            assert_eq!(datapath.attached().unwrap(), []);
            assert_eq!(attached_at("t0", Program::GuestShut), 0);
            let flags = Device::named("t0").unwrap().flags().unwrap();
            assert_eq!(flags & libc::IFF_UP, 0);

            drop(full);
            // The kernel ends a link some time after its last descriptor.
            let chain = || bpf::tcx_programs(tap).unwrap().len();
            let deadline = Instant::now() + Duration::from_secs(10);
            while chain() > 0 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(chain(), 0);
            let again = TapChange::Again { ifindex: tap };
            assert_eq!(follow(), [(vm.row, again)]);
            assert_eq!(attached_at("t0", Program::GuestEgress), 1);
        },
    );
}

#[test]
fn a_shut_tap_is_down_and_without_program() {
    in_netns("a_shut_tap_is_down_and_without_program", || {
        let (datapath, tap) = (datapath(), make_tap("t0"));
        run("sysctl -qw net.ipv4.conf.all.forwarding=1");
        run("ip link set t0 up");
        serve_tap(&datapath, tap, Hook::Tcx).unwrap();
        assert_eq!(attached_at("t0", Program::GuestEgress), 1);
        assert_eq!(run("sysctl -n net.ipv4.conf.t0.forwarding").trim(), "0");
        shut_tap(&datapath, tap).unwrap();
        let flags = Device::named("t0").unwrap().flags().unwrap();
        assert_eq!(flags & libc::IFF_UP, 0);
        assert_eq!(attached_at("t0", Program::GuestEgress), 0);
        run("ip link del t0");
        shut_tap(&datapath, tap).unwrap();
    });
}

/// Returns how the guest's program is attached to a TAP.
fn attached_by(datapath: &Datapath, tap: IfIndex) -> Vec<AttachedBy> {
    let attached = datapath.attached().unwrap().into_iter();
    let egress = attached.filter(|a| a.program == Program::GuestEgress && a.ifindex == tap);
    egress.map(|attached| attached.by).collect()
}

/// A tcx program, or a filter of the same priority, would run before a filter of ours.
#[test]
fn a_tap_whose_hooks_others_use_gets_a_tcx_link() {
    in_netns("a_tap_whose_hooks_others_use_gets_a_tcx_link", || {
        let datapath = datapath();
        let other = probe::pass_program().unwrap();
        let (linked, filtered, free) = (make_tap("t0"), make_tap("t1"), make_tap("t2"));
        let _link = bpf::link_create_tcx(other.as_fd(), linked, bpf::ChainPosition::First).unwrap();
        run("tc qdisc add dev t1 clsact");
        let pin = datapath.paths().pin("uplink_ingress");
        let pin = pin.display();
        run(&format!(
            "tc filter add dev t1 ingress pref 1 bpf da pinned {pin}"
        ));
        for (tap, by) in [
            (linked, AttachedBy::Link),
            (filtered, AttachedBy::Link),
            (free, AttachedBy::Clsact),
        ] {
            // The second time, the qdisc is ours.
            for _ in 0..2 {
                serve_tap(&datapath, tap, Hook::Clsact).unwrap();
                assert_eq!(attached_by(&datapath, tap), [by]);
            }
        }
        for tap in [linked, filtered] {
            assert!(
                datapath
                    .standing(Program::GuestEgress, tap)
                    .unwrap()
                    .is_first()
            );
        }
        for tap in ["t0", "t1", "t2"] {
            assert_eq!(attached_at(tap, Program::GuestEgress), 1, "{tap}");
            assert_eq!(attached_at(tap, Program::GuestShut), 1, "{tap}");
        }
        // Somebody's link that comes later: the next process sees to it.
        let _late = bpf::link_create_tcx(other.as_fd(), free, bpf::ChainPosition::First).unwrap();
        serve_tap(&datapath, free, Hook::Clsact).unwrap();
        assert_eq!(attached_by(&datapath, free), [AttachedBy::Link]);
        assert!(
            datapath
                .standing(Program::GuestEgress, free)
                .unwrap()
                .is_first()
        );
    });
}

/// A daemon takes over from one that used links, and `attach` from a daemon.
#[test]
fn a_successor_by_another_hook_leaves_no_gap() {
    in_netns("a_successor_by_another_hook_leaves_no_gap", || {
        let (datapath, tap) = (datapath(), make_tap("t0"));
        let link = || {
            let pin = datapath.paths().pin(&format!("guest_egress-{tap}"));
            bpf::link_info(bpf::obj_get(&pin).unwrap().as_fd())
                .unwrap()
                .id
        };
        serve_tap(&datapath, tap, Hook::Tcx).unwrap();
        let before = link();
        serve_tap(&datapath, tap, Hook::Clsact).unwrap();
        assert_eq!(attached_by(&datapath, tap), [AttachedBy::Link]);
        assert_eq!(link(), before, "the link is the same one");

        shut_tap(&datapath, tap).unwrap();
        assert_eq!(datapath.attached().unwrap(), []);
        serve_tap(&datapath, tap, Hook::Clsact).unwrap();
        assert_eq!(attached_by(&datapath, tap), [AttachedBy::Clsact]);
        serve_tap(&datapath, tap, Hook::Tcx).unwrap();
        assert_eq!(attached_by(&datapath, tap), [AttachedBy::Link]);
        assert_eq!(attached_at("t0", Program::GuestEgress), 1);
        assert_eq!(attached_at("t0", Program::GuestShut), 1);
    });
}

/// Opens a TAP as a VMM does.
fn open_tap(name: &str) -> File {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    let tun = File::options().read(true).write(true).open("/dev/net/tun");
    let tun = tun.unwrap();
    // SAFETY: plain data.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
    // SAFETY: the argument is what the request wants.
    let set = unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF, &raw mut request) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    tun
}

/// A UDP packet of the guest's to `192.0.2.9`, in a frame to this MAC.
fn frame_to(mac: [u8; 6]) -> Vec<u8> {
    let mut ip = vec![0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0];
    ip.extend([10, 0, 2, 15, 192, 0, 2, 9]);
    let sum: u32 = ip
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let udp = [0x0f, 0xa0, 0, 9, 0, 8, 0, 0];
    [&mac[..], &[2, 0, 0, 0, 0, 1], &[8, 0], &ip, &udp].concat()
}

/// On a host that forwards packets, a TAP without its program would be a way out without NAT.
#[test]
fn a_tap_that_lost_its_program_by_hand_carries_nothing() {
    in_netns(
        "a_tap_that_lost_its_program_by_hand_carries_nothing",
        || {
            for command in [
                "sysctl -qw net.ipv6.conf.all.disable_ipv6=1",
                "sysctl -qw net.ipv4.ip_forward=1",
                "sysctl -qw net.ipv4.conf.all.rp_filter=0",
                "ip link add out0 type veth peer name out1",
                "ip link set out1 up",
                "ip addr add 192.0.2.1/24 dev out0",
                "ip link set out0 up",
                "ip neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev out0",
            ] {
                run(command);
            }
            let sent = || {
                let shown = run("ip -s link show out0");
                let counts = shown.lines().last().unwrap().split_whitespace();
                counts.map(|n| n.parse::<u64>().unwrap()).nth(1).unwrap()
            };
            let datapath = datapath();
            let maps = datapath.maps();
            let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
            for hook in [Hook::Tcx, Hook::Clsact] {
                let tap = make_tap("t0");
                let spec = VmSpec {
                    tap_ifindex: Some(tap),
                    ..vm_spec("a")
                };
                let vm = vm::open(maps, &owner, &spec).unwrap();
                serve_tap(&datapath, tap, hook).unwrap();
                let vmm = open_tap("t0");
                // As if another process had restored that, too.
                for key in ["forwarding=1", "rp_filter=0"] {
                    run(&format!("sysctl -qw net.ipv4.conf.t0.{key}"));
                }
                let link = run("ip -br link show t0");
                let mac = link.split_whitespace().nth(2).unwrap();
                let mut bytes = mac.split(':').map(|b| u8::from_str_radix(b, 16).unwrap());
                let frame = frame_to(std::array::from_fn(|_| bytes.next().unwrap()));
                // SAFETY: a row of mapped counters.
                let unserved = || unsafe { maps.drops(vm.row).unwrap().read_volatile() }.unserved;
                let before = (sent(), unserved().packets);

                let pin = datapath.paths().pin(&format!("guest_egress-{tap}"));
                drop(match hook {
                    Hook::Tcx => run(&format!("bpftool link detach pinned {}", pin.display())),
                    Hook::Clsact => run("tc filter del dev t0 ingress pref 1"),
                });
                assert_eq!(attached_at("t0", Program::GuestEgress), 0);
                (&vmm).write_all(&frame).unwrap();
                assert_eq!((sent(), unserved().packets), (before.0, before.1 + 1));
                assert_eq!(unserved().bytes % 28, 0);

                // And without it, it is one.
                datapath.detach(Program::GuestShut, tap).unwrap();
                (&vmm).write_all(&frame).unwrap();
                assert_eq!((sent(), unserved().packets), (before.0 + 1, before.1 + 1));
                drop(vmm);
                run("ip link del t0");
                vm::forget_tap(maps, vm.row, Some(tap)).unwrap();
                datapath.remove_defunct().unwrap();
            }
        },
    );
}
