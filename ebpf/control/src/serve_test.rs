use super::*;
use crate::{
    Owner,
    maps::SharedMaps,
    netlink::NetworkWatch,
    testing::{attached_at, datapath, in_netns, make_tap, run, vm_spec},
    vm::VmSpec,
};

fn update_until(watch: &mut NetworkWatch, what: impl Fn(&Network) -> bool) {
    for _ in 0..200 {
        watch.update().unwrap();
        if what(watch.network()) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("no such change in two seconds: {:?}", watch.network());
}

fn tap_known(maps: &SharedMaps, ifindex: u32) -> bool {
    maps.taps.get(&ifindex).unwrap().is_some()
}

#[test]
fn a_tap_made_again_under_its_name_is_served_again() {
    in_netns("a_tap_made_again_under_its_name_is_served_again", || {
        let datapath = datapath();
        let maps = datapath.maps();
        let owner = Owner::take(maps, datapath.paths(), &[]).unwrap();
        let tap = make_tap("t0");
        let vm = vm::open(
            maps,
            &owner,
            &VmSpec {
                tap_ifindex: tap,
                ..vm_spec("a")
            },
        )
        .unwrap();
        serve_tap(&datapath, tap, Hook::Tcx).unwrap();
        let up = |name: &str| Device::named(name).unwrap().flags().unwrap() & libc::IFF_UP != 0;
        assert!(up("t0"));
        let mut watch = NetworkWatch::open().unwrap();
        let served = [Served {
            vm_row: vm.row,
            tap: "t0".into(),
        }];
        let follow =
            |watch: &NetworkWatch| follow_taps(&datapath, watch.network(), &served, Hook::Tcx);
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
        assert_eq!(row.id().load(Acquire), vm.id);
        assert_eq!(row.tap_ifindex().load(Acquire), again);
    });
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
