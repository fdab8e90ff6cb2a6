use std::{
    io::Cursor,
    sync::{Arc, Mutex},
};

use slipgate_abi::{Slot, Verdict};

use super::*;
use crate::flow::EndReason;

#[derive(Clone, Default)]
struct Sink {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Takes so many bytes, then fails once.
    fails_after: Arc<Mutex<Option<usize>>>,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut fails_after = self.fails_after.lock().unwrap();
        let n = match *fails_after {
            Some(0) => {
                *fails_after = None;
                return Err(io::ErrorKind::StorageFull.into());
            }
            Some(n) => n.min(bytes.len()),
            None => bytes.len(),
        };
        if let Some(left) = &mut *fails_after {
            *left -= n;
        }
        self.bytes.lock().unwrap().extend_from_slice(&bytes[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn ended(slot: u32) -> Ended {
    let ip = |octets| Ip4 { octets };
    Ended {
        slot,
        content: Slot {
            generation: 3,
            verdict: Verdict::Closing,
            tcp: 0,
            next_hop: 0,
            tx_packets: 1,
            tx_bytes: 2,
            rx_packets: 3,
            rx_bytes: 4,
            tx_last_ns: 0,
            rx_last_ns: 0,
            vm: 1,
            vm_row: 1,
            guest: ip([10, 0, 2, 15]),
            remote: ip([198, 51, 100, 1]),
            nat: ip([192, 0, 2, 1]),
            guest_port: 5_000,
            remote_port: 443,
            nat_port: 61_000,
            protocol: Protocol::Udp,
            flags: 0,
            isn: 0,
            created_ns: 1_000_000_000,
            rule: 2,
            uplink_ifindex: 1,
            owner: 0,
            epoch: 1,
            fin_end_tx: 0,
            fin_end_rx: 0,
            connect_us: 0,
        },
        reason: EndReason::Idle,
        ended_ns: 2_500_000_000,
    }
}

const NAMES: Names<'_> = Names {
    vm: "a \"b\"",
    rule: Some("--allow 198.51.100.0/24"),
    dns: None,
};

fn at(seconds: u64, millis: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(millis)
}

#[test]
fn a_line_is_json_with_every_field() {
    let sink = Sink::default();
    let mut log = FlowLog::new(Some(Box::new(sink.clone())));
    log.set_instance(0x5f3a_91c2);
    log.record(&ended(17), NAMES, at(1_700_000_001, 500));
    log.flush();
    let text = sink.bytes.lock().unwrap().clone();
    let line: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(
        line,
        serde_json::json!({
            "id": "5f3a91c2-17-3", "vm": "a \"b\"", "proto": "udp",
            "guest": "10.0.2.15:5000", "remote": "198.51.100.1:443", "nat": "192.0.2.1:61000",
            "rule": 2, "rule_text": "--allow 198.51.100.0/24", "verdict": "fast",
            "started": "2023-11-14T22:13:20.000Z", "duration_ms": 1500,
            "tx_packets": 1, "tx_bytes": 2, "rx_packets": 3, "rx_bytes": 4,
            "end": "idle", "direction": "outbound", "path": "kernel",
        })
    );
    assert_eq!(log.counts(), (1, 0));
}

#[test]
fn what_can_t_be_written_is_counted_and_the_next_line_is_whole() {
    let sink = Sink::default();
    *sink.fails_after.lock().unwrap() = Some(10);
    let mut log = FlowLog::new(Some(Box::new(sink.clone())));
    log.record(&ended(1), NAMES, at(1_700_000_000, 0));
    log.record(&ended(2), NAMES, at(1_700_000_000, 0));
    log.flush();
    assert_eq!(log.counts(), (0, 2));
    log.record(&ended(3), NAMES, at(1_700_000_000, 0));
    log.flush();
    assert_eq!(log.counts(), (1, 2));
    let text = sink.bytes.lock().unwrap().clone();
    let ids = recorded_ids(&mut Cursor::new(text)).unwrap();
    assert_eq!(
        ids.into_iter().collect::<Vec<_>>(),
        [Id {
            instance: 0,
            slot: 3,
            generation: 3
        }]
    );
}

#[test]
fn rotation_loses_no_record() {
    let (old, new) = (Sink::default(), Sink::default());
    let mut log = FlowLog::new(Some(Box::new(old.clone())));
    log.record(&ended(1), NAMES, at(1, 0));
    log.set_writer(Some(Box::new(new.clone())));
    log.record(&ended(2), NAMES, at(1, 0));
    log.flush();
    let ids =
        |sink: &Sink| recorded_ids(&mut Cursor::new(sink.bytes.lock().unwrap().clone())).unwrap();
    assert!(ids(&old).contains(&Id {
        instance: 0,
        slot: 1,
        generation: 3
    }));
    assert!(ids(&new).contains(&Id {
        instance: 0,
        slot: 2,
        generation: 3
    }));
}

#[test]
fn garbage_in_a_log_is_passed_over() {
    let text = b"\xff\xfe\n{\"id\":\"00000000-1-2\"}\n{\"id\":\"x\"}\n{\"id\":7}\nnot json\n{\"id\":\"00000000-3-4\"";
    let ids = recorded_ids(&mut Cursor::new(&text[..])).unwrap();
    assert_eq!(
        ids.into_iter().collect::<Vec<_>>(),
        [Id {
            instance: 0,
            slot: 1,
            generation: 2
        }]
    );
}

#[test]
fn rfc3339_times() {
    for (seconds, millis, text) in [
        (0, 0, "1970-01-01T00:00:00.000Z"),
        (951_782_399, 999, "2000-02-28T23:59:59.999Z"),
        (951_782_400, 0, "2000-02-29T00:00:00.000Z"),
        (1_709_164_800, 1, "2024-02-29T00:00:00.001Z"),
        (4_102_444_799, 0, "2099-12-31T23:59:59.000Z"),
    ] {
        assert_eq!(Rfc3339(at(seconds, millis)).to_string(), text);
    }
}
