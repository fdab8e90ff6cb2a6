//! Rate limits of disks and of the network card, by what a guest does and by count.
use std::{fs, time::Duration};

use slipgate_testbed::{MicroVmEnd, require_kvm, require_root_and_tun};

use crate::{Bed, WAIT};

fn ran(end: &MicroVmEnd) -> Duration {
    Duration::from_micros(end.report["ran_us"].as_u64().unwrap())
}

#[test]
fn a_limited_disk_is_slower_and_loses_nothing() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let path = bed.folder.path().join("disk");
    fs::File::create(&path).unwrap().set_len(4 << 20).unwrap();
    // 100 requests a second, two at once.
    let disk = format!("{},iops=2/20ms", path.display());
    let work = "disk 0 write 4194304; disk 0 check 4194304; wait 1";
    let flags = ["--disk", &disk, "--cmdline", work];
    let end = bed.start_with(&flags).finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(0), "{}", end.stderr);
    let counters = &end.report["vmm"]["disks"][0];
    // 64 KiB in each.
    assert_eq!(
        (&counters["writes"], &counters["reads"]),
        (&64.into(), &64.into())
    );
    assert!(counters["throttled"].as_u64().unwrap() > 0, "{counters}");
    assert_eq!(counters["failed"], 0);
    assert!(
        ran(&end) >= Duration::from_millis(10) * 125,
        "{:?}",
        ran(&end)
    );
    assert_eq!(
        end.report["machine"]["disks"][0]["rate"]["operations"]["size"],
        2
    );
}

#[test]
fn a_limited_card_sends_and_receives_no_more_and_loses_nothing() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let flags = [
        "--net-rate-tx",
        "packets=2/20ms",
        "--net-rate-rx",
        "bandwidth=2K/200ms",
        "--cmdline",
        "ping 10.0.2.2 100",
    ];
    let end = bed.start_with(&flags).finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(0), "{}", end.stderr);
    let pair = &end.report["vmm"]["net"]["pairs"][0];
    let count = |name: &str| pair[name].as_u64().unwrap();
    assert!(
        count("tx_frames") > 100 && count("rx_frames") > 100,
        "{pair}"
    );
    assert!(count("tx_throttled") > 0, "{pair}");
    // Two packets at once and one that is overdrawn, then 100 a second.
    let by_packets = Duration::from_millis(10) * (count("tx_frames") as u32 - 3);
    // A bucket, and a frame that is overdrawn; then 10 KiB a second.
    let by_bytes = count("rx_bytes").saturating_sub(2_048 + 1_514) * 1_000 / 10_240;
    let least = by_packets.max(Duration::from_millis(by_bytes));
    assert!(ran(&end) >= least, "{:?} {least:?}", ran(&end));
    let drops = pair["drops"].as_object().unwrap();
    assert!(drops.values().all(|count| count == 0), "{pair}");
}
