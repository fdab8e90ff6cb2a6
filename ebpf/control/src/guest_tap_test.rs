use super::*;
use crate::{
    device::Device,
    testing::{in_netns, run},
};

#[test]
fn it_is_down_has_its_queues_and_goes_with_them() {
    in_netns("it_is_down_has_its_queues_and_goes_with_them", || {
        let tap = GuestTap::make("vm%d", 3).unwrap();
        assert_eq!((tap.name.as_str(), tap.queues.len()), ("vm0", 3));
        let shown = run("ip -d link show vm0");
        for part in [
            "state DOWN",
            "multi_queue",
            "numqueues 3",
            "vnet_hdr",
            "persist off",
        ] {
            assert!(shown.contains(part), "`{part}` in: {shown}");
        }
        let second = GuestTap::make("vm%d", 1).unwrap();
        assert_eq!(second.name, "vm1");
        let taken = GuestTap::make("vm1", 1).unwrap_err().to_string();
        assert!(
            taken.contains("vm1") && taken.contains("another name"),
            "{taken}"
        );
        drop(tap);
        assert!(Device::named("vm0").is_err());
        assert!(Device::named("vm1").is_ok());
    });
}

#[test]
fn one_for_another_vmm_stays_until_it_is_removed() {
    in_netns("one_for_another_vmm_stays_until_it_is_removed", || {
        let tap = PersistentTap {
            name: "sg0",
            user: Some(1234),
            group: Some(5678),
            is_multi_queue: false,
            mtu: Some(1400),
        };
        tap.make().unwrap();
        let shown = run("ip -d link show sg0");
        for part in [
            "state DOWN",
            "mtu 1400",
            "vnet_hdr",
            "persist on",
            "user 1234",
            "group 5678",
        ] {
            assert!(shown.contains(part), "`{part}` in: {shown}");
        }
        assert!(!shown.contains("multi_queue on"), "{shown}");
        assert!(matches!(tap.make(), Err(Error::DeviceExists(_))));
        assert!(PersistentTap::remove("sg0").unwrap());
        assert!(!PersistentTap::remove("sg0").unwrap());
        let wrong = PersistentTap {
            mtu: Some(1),
            ..tap
        };
        assert!(wrong.make().is_err());
        assert!(Device::named("sg0").is_err());
    });
}

#[test]
fn one_that_is_there_is_opened_and_one_that_is_open_is_not_shared() {
    in_netns(
        "one_that_is_there_is_opened_and_one_that_is_open_is_not_shared",
        || {
            let at_once = Duration::ZERO;
            let made = GuestTap::open_or_make("vm0", 2, at_once).unwrap();
            assert_eq!((made.queues.len(), made.is_persistent), (2, false));
            let taken = GuestTap::open_or_make("vm0", 1, at_once).unwrap_err();
            assert!(matches!(taken, Error::TapIsOpen(_)), "{taken}");
            // Its VMM is about to end.
            let ends = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                drop(made);
            });
            let again = GuestTap::open_or_make("vm0", 2, Duration::from_secs(10)).unwrap();
            ends.join().unwrap();
            assert_eq!(again.queues.len(), 2);

            for (name, more) in [("single", ""), ("several", " multi_queue")] {
                run(&format!("ip tuntap add {name} mode tap{more}"));
                let tap = GuestTap::open_or_make(name, 1, at_once).unwrap();
                assert!(tap.is_persistent, "{name}");
                let taken = GuestTap::open_or_make(name, 1, at_once).unwrap_err();
                assert!(matches!(taken, Error::TapIsOpen(_)), "{name}: {taken}");
                drop(tap);
                let several = GuestTap::open_or_make(name, 2, at_once);
                match several {
                    Ok(tap) => assert_eq!((name, tap.queues.len()), ("several", 2)),
                    Err(e) => assert!(
                        name == "single" && e.to_string().contains("one queue"),
                        "{e}"
                    ),
                }
            }
            // Somebody opens it between the look and the opening.
            let tap = GuestTap::open_or_make("several", 1, at_once).unwrap();
            assert!(tap.is_alone().unwrap());
            let another = open_queue("several", libc::IFF_MULTI_QUEUE).unwrap();
            assert!(!tap.is_alone().unwrap());
            drop((tap, another));
            let device = GuestTap::open_or_make("lo", 1, at_once).unwrap_err();
            assert!(matches!(device, Error::NoTap(_)), "{device}");
        },
    );
}

#[test]
fn a_new_one_has_no_name_that_is_taken_though_no_device_has_it() {
    in_netns(
        "a_new_one_has_no_name_that_is_taken_though_no_device_has_it",
        || {
            let taken = BTreeSet::from(["vm0", "vm2"].map(str::to_owned));
            let make = |taken: &BTreeSet<String>| GuestTap::make_beside("vm%d", 1, taken).unwrap();
            let (first, second) = (make(&taken), make(&taken));
            assert_eq!((&*first.name, &*second.name), ("vm1", "vm3"));
            // With none that is taken the kernel chooses.
            assert_eq!(make(&BTreeSet::new()).name, "vm0");
            let given = GuestTap::make_beside("vm2", 1, &taken).unwrap();
            assert_eq!(given.name, "vm2");
        },
    );
}
