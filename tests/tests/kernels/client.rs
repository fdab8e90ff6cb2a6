//! A stock Linux as the guest of a stock VMM: QEMU has the TAP that `slipgate attach` serves.

use serde_json::Value;
use slipgate_testbed::{
    PinDir, Slipgate, World,
    rig::{Client, ClientReport, Hardware, Kernel, Machine},
    skipped,
    world::UPLINK,
};

use super::TIMEOUT;

const TAP: &str = "tap0";

#[test]
fn debian_6_1_behind_qemu() {
    slipgate_testbed::require_root_and_tun!();
    let _turn = slipgate_testbed::turns::alone("QEMU without KVM keeps each CPU busy");
    let found = Machine::is_possible().and_then(|()| Kernel::find("6.1"));
    let kernel = match found {
        Ok(kernel) => kernel,
        Err(why) => return skipped!("{why}"),
    };
    let client = Client::new();
    let initramfs = client.initramfs(&kernel).unwrap();

    let world = World::new().unwrap();
    let _servers = client.serve(&world).unwrap();
    world
        .host
        .ip(&format!("tuntap add {TAP} mode tap multi_queue vnet_hdr"))
        .unwrap();
    let flags = client.nat_flags();
    let mut args = vec!["--tap", TAP, "--uplink", UPLINK];
    args.extend(flags.iter().map(String::as_str));
    let slipgate = Slipgate::attach(&world.host, &PinDir::new().unwrap(), &args).unwrap();

    let net = format!("tap,id=n,ifname={TAP},script=no,downscript=no,vhost=off,queues=2");
    let card = "virtio-net-pci,netdev=n,mq=on,vectors=6";
    let machine = Machine {
        kernel: &kernel,
        initramfs: &initramfs,
        parameters: "tsc=reliable",
        timeout: TIMEOUT,
        hardware: Hardware {
            cpus: 2,
            cpu_model: "qemu64",
            memory_mib: 256,
            devices: &["-netdev", &net, "-device", card].map(str::to_owned),
            namespace: Some(&world.host),
        },
    };
    let ended = machine.run().unwrap();
    let report = ClientReport::read(&ended.console);
    println!("{:#?}\n{:.1} s", report.ok, ended.took.as_secs_f64());
    let said = || format!("{}; its console:\n{}", ended.how, ended.console);
    assert!(report.is_whole() && ended.powered_off, "{}", said());

    // The bytes of the streams went by the kernel, not by the engine.
    let total = slipgate.stats().unwrap()["total"].take();
    let number = |value: &Value| value.as_u64().unwrap();
    let kernel = number(&total["kernel"]["tx_packets"]) + number(&total["kernel"]["rx_packets"]);
    let ways = ["from_guest", "to_guest", "from_world", "to_world"];
    let engine = ways.map(|way| number(&total["engine"][way]["packets"]));
    let engine: u64 = engine.iter().sum();
    assert!(kernel > 99 * engine, "kernel {kernel}, engine {engine}");
    assert_ne!(total["refused"]["rule"], 0, "{total}");
}
