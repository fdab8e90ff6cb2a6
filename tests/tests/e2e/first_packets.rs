//! First packets that come by the ring in shared memory: those of real stacks, and over a kill.

use std::{
    net::UdpSocket,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
};

use slipgate_abi::OwnerRef;
use slipgate_control::SharedMaps;
use slipgate_testbed::{Guest, clients::tcp};

use crate::{Cell, WAIT, daemon::Stand, eventually, matrix::matrix, stand::maps};

matrix! {
    connections_are_made_while_first_packets_come_by_the_ring: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the engine reads the guest's frames itself";
    a_killed_engines_ring_is_used_again_and_no_credit_is_lost: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the engine reads the guest's frames itself";
}

/// Ports to which a flood sends, some of them the server's world drops.
const FLOOD_PORTS: std::ops::Range<u16> = 20_000..60_000;

fn row(maps: &SharedMaps) -> OwnerRef {
    let rows = (0..64).filter_map(|row| maps.owner_ref(row));
    let of_engine = |row: &OwnerRef| row.handed_over().load(Relaxed) > 0;
    rows.into_iter()
        .find(of_engine)
        .expect("a row with frames handed over")
}

/// Packets that came by the ring so far.
fn by_ring(maps: &SharedMaps) -> u64 {
    row(maps).ring_tail().load(Relaxed)
}

/// Sends first packets of flows from the guest as fast as it can, while `body` runs.
fn under_flood<T: Send>(stand: &Stand, guest: &Guest, body: impl FnOnce() -> T + Send) -> T {
    /// Ends the flood, also when `body` panics: the scope waits for its thread.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }

    let is_over = AtomicBool::new(false);
    let (any, server) = (stand.cell.family.unspecified(), stand.cell.server());
    thread::scope(|scope| {
        let _over = Over(&is_over);
        scope.spawn(|| {
            guest.run(|| {
                let socket = UdpSocket::bind((any, 0)).unwrap();
                for port in FLOOD_PORTS.cycle() {
                    if is_over.load(Relaxed) {
                        break;
                    }
                    // A full queue of its own device is no matter.
                    let _ = socket.send_to(b"first", (server, port));
                }
            });
        });
        body()
    })
}

fn connections_are_made_while_first_packets_come_by_the_ring(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let (flooding, guest) = (stand.guest("tap0"), stand.guest("tap1"));
    stand.vm(&["add", "a", "--tap", "tap0"]);
    stand.vm(&["add", "b", "--tap", "tap1"]);
    drop(stand.connect(&guest));
    let maps = maps(stand.daemon.pins());
    under_flood(&stand, &flooding, || {
        eventually("the ring is in use", || {
            (by_ring(&maps) > 1_000).then_some(())
        });
        // A SYN of the stack has a partial checksum, which only the frame's metadata tells. One goes by
        // the port where it finds the engine asleep, or the ring full.
        let before = by_ring(&maps);
        let connect = || guest.run(|| tcp::connect(stand.echo.address(), WAIT));
        let mut streams: Vec<_> = (0..100).map(|_| connect().unwrap()).collect();
        assert!(by_ring(&maps) > before + 100);
        for stream in &mut streams {
            stand.goes_on(&guest, stream);
        }
    });
}

fn a_killed_engines_ring_is_used_again_and_no_credit_is_lost(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    stand.vm(&["add", "a", "--tap", "tap0"]);
    let mut stream = stand.connect(&guest);
    let maps = maps(stand.daemon.pins());
    let engine = || stand.daemon.children_named("slipgate-engine");
    let old = engine();
    let killed_at = under_flood(&stand, &guest, || {
        eventually("the ring is in use", || {
            (by_ring(&maps) > 1_000).then_some(())
        });
        slipgate_testbed::signal(old[0], libc::SIGKILL);
        eventually("another engine", || {
            let now = engine();
            (now.len() == 1 && now != old).then_some(())
        });
        let killed_at = by_ring(&maps);
        eventually("the ring is in use again", || {
            (by_ring(&maps) > killed_at + 1_000).then_some(())
        });
        killed_at
    });
    assert!(killed_at > 1_000);
    // All that is in the ring is read, and no credit is lost.
    let (row, vm) = (row(&maps), maps.vm(maps.vm_rows().next().unwrap()).unwrap());
    eventually("no credit is out, and no packet in the ring", || {
        let (handed_over, taken_in) = vm.under_way(false);
        let is_settled = handed_over.load(Relaxed) == taken_in.load(Relaxed)
            && row.ring_tail().load(Relaxed) == row.ring_head().load(Relaxed)
            && row.port_handed().load(Relaxed) == row.port_taken().load(Relaxed);
        is_settled.then_some(())
    });
    stand.goes_on(&guest, &mut stream);
    drop(stand.connect(&guest));
}
