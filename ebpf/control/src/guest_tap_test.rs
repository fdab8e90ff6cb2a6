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
