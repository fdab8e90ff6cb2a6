use std::net::Ipv4Addr;

use serde::Deserialize;
use slipgate_ipc::client::GuestNetwork;

use super::*;

/// The file as Kata's runtime-rs reads it: fields and types of `DanConfig` in its
/// `crates/resource/src/network/dan.rs` (4.1.0). Theirs passes unknown fields over; here one that
/// they do not read fails, because it would be without effect.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct DanConfig {
    netns: Option<String>,
    devices: Vec<DanDevice>,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct DanDevice {
    name: String,
    /// Theirs makes one up if it is missing; the daemon knows another then.
    guest_mac: String,
    device: HostTap,
    network_info: NetworkInfo,
}

/// Fields of Kata's interface type `"host-tap"`. Theirs is an enum with that tag.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostTap {
    r#type: String,
    tap_name: String,
    /// Queue pairs. 0: as many as the hypervisor's configuration says.
    #[serde(default)]
    queue_num: usize,
    #[serde(default)]
    queue_size: usize,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkInfo {
    interface: Interface,
    #[serde(default)]
    routes: Vec<Route>,
    #[serde(default)]
    neighbors: Vec<Neighbor>,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Interface {
    ip_addresses: Vec<String>,
    mtu: u64,
    #[serde(default)]
    ntype: String,
    #[serde(default)]
    flags: u32,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Route {
    /// Empty: the default route.
    #[serde(default)]
    dest: String,
    #[serde(default)]
    gateway: String,
    #[serde(default)]
    source: String,
    #[serde(default)]
    scope: u32,
    #[serde(default)]
    flags: u32,
    #[serde(default)]
    mtu: u32,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Neighbor {
    ip_address: Option<String>,
    #[serde(default)]
    hardware_addr: String,
    #[serde(default)]
    state: u32,
    #[serde(default)]
    flags: u32,
}

fn attachment(ifname: &str) -> Attachment {
    Attachment {
        container: "pod".into(),
        ifname: ifname.into(),
        args: crate::cni::request::Arguments::default(),
    }
}

fn address(tap: &str) -> Address {
    Address {
        tap: tap.into(),
        mac: "02:00:00:00:00:07".into(),
        ip: Ipv4Addr::new(10, 0, 2, 15),
        mtu: 1400,
        network: GuestNetwork {
            guest: Ipv4Addr::new(10, 0, 2, 15),
            gateway: Ipv4Addr::new(10, 0, 2, 2),
            dns: Ipv4Addr::new(10, 0, 2, 3),
            prefix_len: 24,
            mtu: None,
        },
    }
}

#[test]
fn the_file_has_the_fields_and_types_that_kata_reads() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let read = || {
        let text = fs::read(folder.join("pod.json")).unwrap();
        serde_json::from_slice::<DanConfig>(&text).unwrap()
    };
    let (eth0, eth1) = (attachment("eth0"), attachment("eth1"));
    add(folder, &eth0, &address("sg0"), "/proc/1/ns/net", false).unwrap();
    let tap = |name: &str, queue_num| HostTap {
        r#type: "host-tap".into(),
        tap_name: name.into(),
        queue_num,
        queue_size: 256,
    };
    let one = read();
    assert_eq!(one.netns.as_deref(), Some("/proc/1/ns/net"));
    let [device] = one.devices.as_slice() else {
        panic!("{one:?}")
    };
    assert_eq!(device.name, "eth0");
    assert_eq!(device.guest_mac, "02:00:00:00:00:07");
    assert_eq!(device.device, tap("sg0", 1));
    let NetworkInfo {
        interface,
        routes,
        neighbors,
    } = &device.network_info;
    assert_eq!(interface.ip_addresses, ["10.0.2.15/24"]);
    assert_eq!((interface.mtu, interface.flags), (1400, 0));
    let [route] = routes.as_slice() else {
        panic!("{routes:?}")
    };
    assert_eq!((&*route.dest, &*route.gateway), ("", "10.0.2.2"));
    assert!(neighbors.is_empty());

    // With several queues the hypervisor's configuration says how many.
    add(folder, &eth1, &address("sg1"), "/proc/1/ns/net", true).unwrap();
    let two = read();
    let taps: Vec<_> = two.devices.iter().map(|device| &device.device).collect();
    assert_eq!(taps, [&tap("sg0", 1), &tap("sg1", 0)]);
    remove(folder, &eth0).unwrap();
    assert_eq!(read().devices[0].device, tap("sg1", 0));
}
