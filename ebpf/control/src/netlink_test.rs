use std::{
    net::{IpAddr, Ipv4Addr},
    os::fd::{AsFd, AsRawFd},
    sync::atomic::Ordering::Acquire,
};

use slipgate_abi::{
    IfIndex,
    link::{NextHopFlags, is_usable},
};

use super::*;
use crate::testing::{datapath, in_netns, run};

const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// An uplink `up0` whose other end is `far0`, both in this namespace.
pub(super) fn uplink() -> IfIndex {
    run("ip link add up0 type veth peer name far0");
    run("ip link set far0 up");
    run("ip link set up0 up");
    run("ip addr add 192.0.2.2/24 dev up0");
    crate::device::Device::named("up0")
        .unwrap()
        .ifindex()
        .unwrap()
}

/// Waits in poll, as a broker does, until the network meets the condition.
pub(super) fn until(watch: &mut NetworkWatch, what: &str, is: impl Fn(&Network) -> bool) {
    for _ in 0..100 {
        watch.update().unwrap();
        if is(watch.network()) {
            return;
        }
        let mut poll = libc::pollfd {
            fd: watch.as_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry, as the count says.
        unsafe { libc::poll(&raw mut poll, 1, 50) };
    }
    panic!("never {what}: {:#?}", watch.network());
}

#[test]
fn a_snapshot_has_what_ip_shows() {
    in_netns("a_snapshot_has_what_ip_shows", || {
        let up0 = uplink();
        run("ip route add default via 192.0.2.1 dev up0 metric 50 mtu 1400");
        run("ip route add blackhole 198.51.100.0/24");
        run(
            "ip route add 203.0.113.0/24 nexthop via 192.0.2.7 dev up0 nexthop via 192.0.2.8 dev up0",
        );
        run("ip neigh add 192.0.2.1 lladdr 02:00:00:00:00:01 dev up0 nud permanent");
        run("ip link set up0 gro_max_size 185000");
        run("ip tuntap add l3 mode tun");
        run("ip tuntap add dev few mode tap");
        run("ip tuntap add dev many mode tap multi_queue");
        let watch = NetworkWatch::open().unwrap();
        let network = watch.network();
        let link = &network.links[&up0];
        assert_eq!((link.name.as_str(), link.mtu), ("up0", 1_500));
        // Linux 6.1 has it too, but an older ip(8) cannot set it.
        assert!(link.gro_max_size.is_none_or(|size| size == 185_000));
        assert!(link.up && link.has_l2 && link.arp && !link.loopback);
        assert_eq!(link.kind.as_deref(), Some("veth"));
        assert!(network.link_by_name("lo").unwrap().loopback);
        assert!(!network.link_by_name("l3").unwrap().has_l2);
        for (name, many) in [("l3", None), ("few", Some(false)), ("many", Some(true))] {
            let tap = network.link_by_name(name).unwrap();
            assert_eq!(tap.is_multi_queue_tap, many, "{name}");
        }
        assert_eq!(network.default_uplink(), Some(link));
        let address = network.address_of(up0).unwrap();
        assert_eq!(
            (address.address, address.prefix_len),
            ([192, 0, 2, 2].into(), 24)
        );

        let route = |destination: [u8; 4]| {
            let destination = IpAddr::from(destination);
            network
                .routes
                .iter()
                .find(|r| r.destination == destination)
                .copied()
                .unwrap()
        };
        let default = route([0; 4]);
        assert_eq!(
            (default.gateway, default.oif, default.metric, default.mtu),
            (Some(ROUTER.into()), Some(up0), 50, Some(1_400))
        );
        let on_link = route([192, 0, 2, 0]);
        assert_eq!(
            (on_link.gateway, on_link.source),
            (None, Some([192, 0, 2, 2].into()))
        );
        assert_eq!(route([198, 51, 100, 0]).kind, RouteKind::Blackhole);
        assert_eq!(route([203, 0, 113, 0]).gateway, Some([192, 0, 2, 7].into()));
        let own = route([192, 0, 2, 2]);
        assert_eq!((own.table, own.kind), (Table::Local, RouteKind::Local));
        let neighbour = network.neighbours[&(up0, ROUTER.into())];
        assert_eq!(neighbour.mac, Some([2, 0, 0, 0, 0, 1]));
        assert!(neighbour.permanent);
    });
}

#[test]
fn a_route_is_there_for_each_of_its_next_hops_that_is_alive() {
    in_netns(
        "a_route_is_there_for_each_of_its_next_hops_that_is_alive",
        || {
            let up0 = uplink();
            run("ip link add up1 type veth peer name far1");
            run("ip link set far1 up");
            run("ip link set up1 up");
            run("ip addr add 198.18.9.2/24 dev up1");
            run(
                "ip route add 203.0.113.0/24 nexthop via 198.18.9.1 dev up1 weight 2 \
                 nexthop via 192.0.2.7 dev up0 weight 3 nexthop via 192.0.2.8 dev up0",
            );
            let mut watch = NetworkWatch::open().unwrap();
            let hops = |network: &Network| -> Vec<_> {
                let routes = network.routes.iter();
                let its = routes.filter(|it| it.destination == IpAddr::from([203, 0, 113, 0]));
                its.map(|it| (it.gateway.unwrap().to_string(), it.weight, it.is_further))
                    .collect()
            };
            let hop = |gateway: &str, weight, is_further| (gateway.to_owned(), weight, is_further);
            let all = [
                hop("198.18.9.1", 2, false),
                hop("192.0.2.7", 3, true),
                hop("192.0.2.8", 1, true),
            ];
            until(&mut watch, "all", |network| hops(network) == all);
            for router in ["192.0.2.7", "192.0.2.8"] {
                let router = router.parse().unwrap();
                assert!(watch.network().is_next_hop(up0, router), "{router}");
            }
            // The first of those that are left is the first.
            run("ip link set up1 down");
            let left = [hop("192.0.2.7", 3, false), hop("192.0.2.8", 1, true)];
            until(&mut watch, "the living", |network| hops(network) == left);
        },
    );
}

#[test]
fn changes_are_followed() {
    in_netns("changes_are_followed", || {
        let up0 = uplink();
        let mut watch = NetworkWatch::open().unwrap();
        until(&mut watch, "quiet", |network| network.links[&up0].up);
        while watch.update().unwrap().any() {}

        let three = IpAddr::from([192, 0, 2, 3]);
        run("ip addr add 192.0.2.3/24 dev up0");
        until(&mut watch, "an address", |n| {
            n.addresses.iter().any(|a| a.address == three)
        });
        run("ip route add default via 192.0.2.1");
        until(&mut watch, "a default route", |n| {
            n.default_uplink().is_some()
        });
        run("ip neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev up0 nud reachable");
        let nine = (up0, IpAddr::from([192, 0, 2, 9]));
        until(&mut watch, "a neighbour", |n| {
            n.neighbours.contains_key(&nine)
        });
        run("ip link set up0 mtu 1280");
        until(&mut watch, "an MTU", |n| n.links[&up0].mtu == 1_280);
        run("ip neigh del 192.0.2.9 dev up0");
        until(&mut watch, "no MAC", |n| {
            n.neighbours.get(&nine).is_none_or(|n| n.mac.is_none())
        });
        run("ip addr del 192.0.2.3/24 dev up0");
        until(&mut watch, "an address less", |n| {
            n.addresses.iter().all(|a| a.address != three)
        });
        // The kernel does not report the routes that are removed with a link.
        run("ip link set up0 down");
        until(&mut watch, "no default route", |n| {
            n.default_uplink().is_none()
        });
    });
}

#[test]
fn changes_say_what_changed() {
    in_netns("changes_say_what_changed", || {
        let up0 = uplink();
        let mut watch = NetworkWatch::open().unwrap();
        until(&mut watch, "quiet", |network| network.links[&up0].up);
        while watch.update().unwrap().any() {}
        run("ip route add 198.51.100.0/24 via 192.0.2.1");
        let changes = watch.update().unwrap();
        assert!(
            changes.routes && !changes.links && !changes.addresses,
            "{changes:?}"
        );
    });
}

#[test]
fn changes_that_are_read_with_a_further_table_are_reported() {
    in_netns(
        "changes_that_are_read_with_a_further_table_are_reported",
        || {
            let up0 = uplink();
            let mut watch = NetworkWatch::open().unwrap();
            until(&mut watch, "quiet", |network| network.links[&up0].up);
            while watch.update().unwrap().any() {}
            run("ip route add default via 192.0.2.1");
            let followed = Followed {
                tables: [100].into(),
                rules: false,
            };
            watch.follow(followed).unwrap();
            assert!(watch.network().default_uplink().is_some());
            assert!(watch.update().unwrap().routes);
        },
    );
}

#[test]
fn a_next_hop_is_valid_exactly_while_its_mac_is_known() {
    in_netns("a_next_hop_is_valid_exactly_while_its_mac_is_known", || {
        let up0 = uplink();
        let datapath = datapath();
        let maps = datapath.maps();
        let mut watch = NetworkWatch::open().unwrap();
        let mut hops = NextHops::new(vec![5]).unwrap();
        let index = maps.claim_next_hop(5, up0, ROUTER, 0).unwrap();
        assert_eq!(
            maps.claim_next_hop(5, up0, ROUTER, 0),
            Some(index),
            "the same again"
        );
        assert_ne!(
            maps.claim_next_hop(6, up0, ROUTER, 0),
            Some(index),
            "another owner's"
        );
        assert_ne!(index, 0);
        let by_lesser_routes = maps.claim_next_hop(5, up0, ROUTER, 1_300).unwrap();
        assert_ne!(by_lesser_routes, index, "for routes of another MTU");
        maps.free_next_hop(by_lesser_routes);
        let hop = maps.next_hop(index).unwrap();
        let valid = || is_usable(hop.sequence().load(Acquire));
        until(&mut watch, "up", |network| network.links[&up0].up);
        assert_eq!(
            hops.refresh(maps, watch.network(), &[up0].into()).unwrap(),
            0
        );
        assert!(!valid());
        let shown = run("ip neigh show dev up0");
        assert!(
            shown.contains("192.0.2.1") && shown.contains("managed"),
            "{shown}"
        );

        run("ip neigh replace 192.0.2.1 lladdr 02:00:00:00:00:01 dev up0 nud reachable");
        until(&mut watch, "a MAC", |n| {
            n.neighbours
                .get(&(up0, ROUTER.into()))
                .is_some_and(|n| n.mac.is_some())
        });
        assert_eq!(
            hops.refresh(maps, watch.network(), &[up0].into()).unwrap(),
            1
        );
        assert!(valid());
        let read = crate::ReadOnlyMaps::open_pinned(&datapath.paths().pin_dir).unwrap();
        let element = read.next_hop(index).unwrap();
        assert_eq!(element.neighbour_mac, [2, 0, 0, 0, 0, 1]);
        assert_eq!(Some(element.uplink_mac), watch.network().links[&up0].mac);
        assert_eq!(
            (element.mtu, element.flags, element.ifindex),
            (1_500, 0, up0.get())
        );

        run("ip neigh replace 192.0.2.1 lladdr 02:00:00:00:00:02 dev up0 nud permanent");
        run("ip link set up0 mtu 1400");
        until(&mut watch, "an MTU", |n| n.links[&up0].mtu == 1_400);
        hops.refresh(maps, watch.network(), &[up0].into()).unwrap();
        let element = read.next_hop(index).unwrap();
        assert_eq!((element.mtu, element.neighbour_mac[5]), (1_400, 2));
        assert!(valid());

        run("ip link set up0 down");
        until(&mut watch, "down", |n| !n.links[&up0].up);
        hops.refresh(maps, watch.network(), &[up0].into()).unwrap();
        assert!(!valid());
    });
}

#[test]
fn a_next_hop_that_is_given_back_is_kept_known_no_more() {
    in_netns("next_hop_given_back", || {
        let up0 = uplink();
        let datapath = datapath();
        let maps = datapath.maps();
        let mut watch = NetworkWatch::open().unwrap();
        let mut hops = NextHops::new(vec![5]).unwrap();
        until(&mut watch, "up", |network| network.links[&up0].up);
        let other: IpAddr = "192.0.2.7".parse().unwrap();
        let index = maps.claim_next_hop(5, up0, ROUTER, 0).unwrap();
        let kept = maps.claim_next_hop(5, up0, other, 0).unwrap();
        hops.refresh(maps, watch.network(), &[up0].into()).unwrap();
        let managed = |address: &str| {
            let shown = run("ip neigh show dev up0");
            let mut lines = shown.lines();
            lines.any(|line| line.starts_with(address) && line.contains("managed"))
        };
        assert!(managed("192.0.2.1 ") && managed("192.0.2.7 "));

        // As the engine does.
        maps.free_next_hop(index);
        assert_eq!(maps.next_hops_of(5).collect::<Vec<_>>(), [kept]);
        hops.refresh(maps, watch.network(), &[up0].into()).unwrap();
        assert!(!managed("192.0.2.1 ") && managed("192.0.2.7 "));

        // The next claimant finds it out of use, and a late writer does not change that.
        let hop = maps.next_hop(index).unwrap();
        let late = hop.withdraw();
        assert_eq!(maps.claim_next_hop(6, up0, other, 0), Some(index));
        assert!(!hop.publish(late));
        assert!(!is_usable(hop.sequence().load(Acquire)));
    });
}

/// The engine writes there, and an attacker may control it.
#[test]
fn neighbours_are_asked_for_where_the_hosts_routes_lead_by_the_uplink_and_nowhere_else() {
    in_netns("foreign_next_hops", || {
        let up0 = uplink();
        run("ip route add 198.51.100.0/24 via 192.0.2.8 dev up0");
        run("ip link add foreign0 type veth peer name foreign1");
        run("ip link set foreign1 up");
        run("ip link set foreign0 up");
        run("ip addr add 203.0.113.2/24 dev foreign0");
        run("ip route add default via 203.0.113.1 dev foreign0");
        let foreign = crate::device::Device::named("foreign0").unwrap();
        let foreign = foreign.ifindex().unwrap();
        run("ip neigh add 203.0.113.1 lladdr 02:00:00:00:00:01 dev foreign0 nud permanent");
        run("ip neigh add 203.0.113.9 lladdr 02:00:00:00:00:09 dev foreign0 nud stale");
        let datapath = datapath();
        let maps = datapath.maps();
        let mut watch = NetworkWatch::open().unwrap();
        until(&mut watch, "up", |n| {
            n.links[&up0].up && n.links[&foreign].up && n.neighbours.len() >= 2
        });
        // Groups come and go as the kernel joins them.
        let shown = || {
            let all = run("ip neigh show nud all");
            let of_hosts = all.lines().filter(|line| !line.contains("NOARP"));
            let of_hosts = of_hosts.map(|line| line.trim_end().to_owned());
            of_hosts.collect::<Vec<_>>().join("\n")
        };
        let before = shown();
        let claim = |ifindex, neighbour: &str| {
            let index = maps.claim_next_hop(5, ifindex, neighbour.parse::<IpAddr>().unwrap(), 0);
            maps.next_hop(index.unwrap()).unwrap()
        };
        let refused = [
            // Other devices, whatever leads there.
            claim(foreign, "203.0.113.1"),
            claim(foreign, "203.0.113.9"),
            claim(foreign, "192.0.2.1"),
            claim(IfIndex::new(1), "127.0.0.2"),
            // By the uplink, but no route has them there: beyond a router, elsewhere, the host
            // itself, a broadcast, a group.
            claim(up0, "198.51.100.7"),
            claim(up0, "203.0.113.1"),
            claim(up0, "10.9.9.9"),
            claim(up0, "192.0.2.2"),
            claim(up0, "192.0.2.255"),
            claim(up0, "224.0.0.1"),
            claim(up0, "0.0.0.0"),
        ];
        // As if it had been filled in besides.
        for hop in &refused {
            assert!(hop.publish(hop.withdraw()));
        }
        let mut hops = NextHops::new(vec![5]).unwrap();
        assert_eq!(
            hops.refresh(maps, watch.network(), &[up0].into()).unwrap(),
            0
        );
        assert_eq!(shown(), before, "nothing was asked for");
        for hop in &refused {
            assert!(!is_usable(hop.sequence().load(Acquire)));
        }
        // And what routes lead to is.
        claim(up0, "192.0.2.8");
        claim(up0, "192.0.2.77");
        hops.refresh(maps, watch.network(), &[up0].into()).unwrap();
        let shown = shown();
        for neighbour in ["192.0.2.8 dev up0", "192.0.2.77 dev up0"] {
            assert!(shown.contains(neighbour), "{shown}");
        }
    });
}

#[test]
fn a_next_hop_outlives_its_route_while_it_is_claimed_and_a_successor_keeps_it() {
    in_netns("outlived_route", || {
        let up0 = uplink();
        let datapath = datapath();
        let maps = datapath.maps();
        let mut watch = NetworkWatch::open().unwrap();
        let [kept, freed] = [ROUTER, Ipv4Addr::new(192, 0, 2, 9)]
            .map(|neighbour| maps.claim_next_hop(5, up0, neighbour, 0).unwrap());
        for neighbour in ["192.0.2.1", "192.0.2.9"] {
            run(&format!(
                "ip neigh replace {neighbour} lladdr 02:00:00:00:00:01 dev up0 nud permanent"
            ));
        }
        until(&mut watch, "up", |n| {
            n.links[&up0].up && n.neighbours.len() >= 2
        });
        let refresh = |hops: &mut NextHops, watch: &NetworkWatch| {
            hops.refresh(maps, watch.network(), &[up0].into()).unwrap()
        };
        let mut hops = NextHops::new(vec![5]).unwrap();
        assert_eq!(refresh(&mut hops, &watch), 2);
        run("ip route flush dev up0 table main");
        until(&mut watch, "no route", |n| {
            !n.is_next_hop(up0, ROUTER.into())
        });
        assert_eq!(refresh(&mut hops, &watch), 2);
        maps.free_next_hop(freed);
        assert_eq!(refresh(&mut hops, &watch), 1);
        // A process that knows nothing of it does not ask for it.
        let noted = hops.right().clone();
        let mut successor = NextHops::new(vec![5]).unwrap().after(noted.clone());
        assert_eq!(refresh(&mut successor, &watch), 1);
        assert!(is_usable(
            maps.next_hop(kept).unwrap().sequence().load(Acquire)
        ));
        assert_eq!(refresh(&mut NextHops::new(vec![5]).unwrap(), &watch), 0);
        // What is not claimed at its start is not right later.
        maps.free_next_hop(kept);
        let mut late = NextHops::new(vec![5]).unwrap().after(noted);
        assert_eq!(refresh(&mut late, &watch), 0);
        maps.claim_next_hop(5, up0, ROUTER, 0).unwrap();
        assert_eq!(refresh(&mut late, &watch), 0);
    });
}

#[test]
fn neighbours_are_asked_for_so_many_at_a_time() {
    in_netns("many_next_hops", || {
        let up0 = uplink();
        run("ip addr add 10.64.0.1/16 dev up0");
        let datapath = datapath();
        let maps = datapath.maps();
        let mut watch = NetworkWatch::open().unwrap();
        until(&mut watch, "up", |network| network.links[&up0].up);
        for number in 0..400u16 {
            let [high, low] = (number + 256).to_be_bytes();
            let claimed = maps.claim_next_hop(5, up0, Ipv4Addr::new(10, 64, high, low), 0);
            assert!(claimed.is_some());
        }
        let mut hops = NextHops::new(vec![5]).unwrap();
        for _ in 0..2 {
            hops.refresh(maps, watch.network(), &[up0].into()).unwrap();
            let shown = run("ip neigh show dev up0 nud all");
            let asked = shown.lines().filter(|line| line.starts_with("10.64."));
            assert_eq!(asked.count(), 256);
        }
    });
}

/// The broker continues when the kernel refuses a neighbour, for whatever reason (a full table, a
/// link that is gone).
#[test]
fn a_neighbour_that_the_kernel_refuses_is_left_to_the_programs() {
    in_netns("refused_neighbour", || {
        let up0 = uplink();
        let datapath = datapath();
        let maps = datapath.maps();
        maps.claim_next_hop(0, up0, ROUTER, 0).unwrap();
        let mut watch = NetworkWatch::open().unwrap();
        let mut hops = NextHops::new(vec![0]).unwrap();
        until(&mut watch, "up", |network| network.links[&up0].up);
        without_net_admin(|| {
            assert_eq!(
                hops.refresh(maps, watch.network(), &[up0].into()).unwrap(),
                0
            )
        });
        assert!(!run("ip neigh show dev up0").contains("192.0.2.1"));
        // The next refresh asks again.
        hops.refresh(maps, watch.network(), &[up0].into()).unwrap();
        assert!(run("ip neigh show dev up0").contains("192.0.2.1"));
    });
}

/// Runs with CAP_NET_ADMIN not in effect in the calling thread.
fn without_net_admin(body: impl FnOnce()) {
    /// `_LINUX_CAPABILITY_VERSION_3`, of this thread.
    static HEADER: [u32; 2] = [0x2008_0522, 0];
    const NET_ADMIN: u32 = 1 << 12;
    // Effective, permitted, inheritable; the low half first.
    let mut sets = [0u32; 6];
    // SAFETY: a header and room for both halves.
    let got = unsafe { libc::syscall(libc::SYS_capget, &raw const HEADER, &raw mut sets) };
    assert_eq!(got, 0);
    let set = |sets: [u32; 6]| {
        // SAFETY: as above.
        let done = unsafe { libc::syscall(libc::SYS_capset, &raw const HEADER, &raw const sets) };
        assert_eq!(done, 0);
    };
    let mut fewer = sets;
    fewer[0] &= !NET_ADMIN;
    set(fewer);
    body();
    set(sets);
}

#[test]
fn a_link_without_l2_needs_no_neighbour() {
    in_netns("a_link_without_l2_needs_no_neighbour", || {
        run("ip tuntap add l3 mode tun");
        run("ip link set l3 up");
        let ifindex = crate::device::Device::named("l3")
            .unwrap()
            .ifindex()
            .unwrap();
        let datapath = datapath();
        let maps = datapath.maps();
        let index = maps
            .claim_next_hop(0, ifindex, Ipv4Addr::UNSPECIFIED, 0)
            .unwrap();
        let mut watch = NetworkWatch::open().unwrap();
        // A tun has a carrier only while a process has it open.
        let valid = NextHops::new(vec![0])
            .unwrap()
            .refresh(maps, watch.network(), &[ifindex].into())
            .unwrap();
        assert_eq!(valid, 0);
        let _open = open_tun("l3");
        until(&mut watch, "up", |network| network.links[&ifindex].up);
        NextHops::new(vec![0])
            .unwrap()
            .refresh(maps, watch.network(), &[ifindex].into())
            .unwrap();
        let read = crate::ReadOnlyMaps::open_pinned(&datapath.paths().pin_dir).unwrap();
        let element = read.next_hop(index).unwrap();
        assert!(is_usable(element.sequence));
        assert_eq!(element.flags, NextHopFlags::NO_L2);
    });
}

fn open_tun(name: &str) -> std::fs::File {
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .unwrap();
    // SAFETY: a struct of integers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    request.ifr_ifru.ifru_flags = libc::IFF_TUN as i16;
    // SAFETY: the request with its struct.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    file
}

/// As a VMM does when its guest's driver starts.
#[test]
fn a_link_whose_offloads_change_is_named_once() {
    const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
    const CSUM_AND_TSO4: libc::c_ulong = 3;
    in_netns("a_link_whose_offloads_change_is_named_once", || {
        uplink();
        run("ip tuntap add l3 mode tun");
        let queue = open_tun("l3");
        let mut watch = NetworkWatch::open().unwrap();
        until(&mut watch, "there", |_| true);
        watch.take_changed_features();
        run("ip link set l3 mtu 1400");
        let ifindex = watch.network().link_by_name("l3").unwrap().ifindex;
        until(&mut watch, "1400", |it| it.links[&ifindex].mtu == 1400);
        assert!(watch.take_changed_features().is_empty());
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        let set = unsafe { libc::ioctl(queue.as_raw_fd(), TUNSETOFFLOAD, CSUM_AND_TSO4) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
        watch.update().unwrap();
        let changed = watch.take_changed_features();
        assert!(changed.into_iter().eq([ifindex]));
        assert!(watch.take_changed_features().is_empty());
    });
}

/// TAPs come and go by the thousand: what concerns one names that one.
#[test]
fn changes_name_the_links() {
    in_netns("changes_name_the_links", || {
        run("ip tuntap add t0 mode tap");
        let up0 = uplink();
        let mut watch = NetworkWatch::open().unwrap();
        until(&mut watch, "quiet", |network| network.links[&up0].up);
        while watch.update().unwrap().any() {}
        let mut named = |commands: &[&str]| {
            commands
                .iter()
                .copied()
                .for_each(|command| drop(run(command)));
            let changes = watch.update().unwrap();
            (changes.links, changes.named.into_iter().collect::<Vec<_>>())
        };
        let of = |names: &[&str]| {
            names
                .iter()
                .map(|name| (*name).to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(named(&["ip link set t0 mtu 1400"]), (true, of(&["t0"])));
        assert_eq!(named(&["ip tuntap add t1 mode tap"]), (true, of(&["t1"])));
        assert_eq!(
            named(&["ip link set t1 name t2"]),
            (true, of(&["t1", "t2"]))
        );
        assert_eq!(named(&["ip link del t2"]), (true, of(&["t2"])));
        // Of a routed one, too.
        assert_eq!(named(&["ip link set up0 mtu 1400"]), (true, of(&["up0"])));
        // Forwarding is said of each device, also when it is turned on for all.
        let t0 = watch.network().link_by_name("t0").unwrap().ifindex;
        run("sysctl -qw net.ipv4.conf.t0.forwarding=1");
        assert_eq!(watch.update().unwrap().forwarding, [t0].into());
        run("sysctl -qw net.ipv4.conf.t0.forwarding=0");
        assert!(watch.update().unwrap().forwarding.is_empty());
        run("sysctl -qw net.ipv4.ip_forward=1");
        assert!(
            watch
                .update()
                .unwrap()
                .forwarding
                .is_superset(&[t0, up0].into())
        );
        // So is IPv6.
        run("sysctl -qw net.ipv6.conf.all.disable_ipv6=1");
        watch.update().unwrap();
        run("sysctl -qw net.ipv6.conf.all.disable_ipv6=0");
        assert!(watch.update().unwrap().ipv6.contains(&up0));
        // Another address is no link's change.
        run("ip addr add 192.0.2.77/24 dev up0");
        let changes = watch.update().unwrap();
        assert!(
            changes.addresses && !changes.links && changes.named.is_empty(),
            "{changes:?}"
        );
    });
}

/// While descriptors are short, changes are missed; they are reported once there are descriptors
/// again, and the watch does not fail.
#[test]
fn who_is_short_of_descriptors_falls_behind_and_catches_up() {
    // The limit is the whole process's, and other tests run beside.
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "netlink::tests::short_of_descriptors",
        ])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
}

#[test]
#[ignore = "the child of who_is_short_of_descriptors_falls_behind_and_catches_up"]
fn short_of_descriptors() {
    in_netns("short_of_descriptors", || {
        let up0 = uplink();
        let mut watch = NetworkWatch::open().unwrap();
        until(&mut watch, "up", |network| network.links[&up0].up);
        run("ip link set up0 mtu 1400");
        watch.fall_behind(&"a test says so");
        let first = watch.due().unwrap();
        // Not asked in vain.
        assert_eq!(watch.due(), Some(first));

        std::thread::sleep(first.saturating_duration_since(std::time::Instant::now()));
        without_descriptors(|| assert!(!watch.update().unwrap().any()));
        let second = watch.due().unwrap();
        assert!(second > first, "it waits again");
        assert_eq!(
            watch.network().links[&up0].mtu,
            1_500,
            "what is known stays"
        );

        std::thread::sleep(second.saturating_duration_since(std::time::Instant::now()));
        let changes = watch.update().unwrap();
        assert!(changes.links && changes.addresses && changes.routes && changes.neighbours);
        assert_eq!(watch.network().links[&up0].mtu, 1_400);
        assert!(watch.take_changed_features().contains(&up0));
        watch.caught_up();
        assert_eq!(watch.due(), None);
        run("ip link set up0 mtu 1300");
        until(&mut watch, "an MTU", |n| n.links[&up0].mtu == 1_300);
    });
}

/// Runs while no descriptor can be allocated.
fn without_descriptors(body: impl FnOnce()) {
    let limit = |soft| {
        // SAFETY: a struct of integers.
        let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
        // SAFETY: room for the limit, and then the limit.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
            let before = std::mem::replace(&mut limit.rlim_cur, soft);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
            before
        }
    };
    let before = limit(0);
    body();
    limit(before);
}
