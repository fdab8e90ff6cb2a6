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
