//! Checks of the control queue: each command is acknowledged, or refused where it has to be.
use super::{
    Bench, Check, Miss, must, question,
    rig::{HEADER, Rig, Running, Setup},
};
use smoltcp::{
    phy::{Device, TxToken},
    time::Instant,
};

use crate::{
    pci::Registers,
    platform::Nic,
    virtio::{
        net::{
            Card, Pair, Vectors, WANTED, command,
            feature::{
                CSUM, CTRL_GUEST_OFFLOADS, CTRL_MAC_ADDR, CTRL_RX, CTRL_VLAN, CTRL_VQ, GUEST_CSUM,
                GUEST_TSO4, GUEST_TSO6, MAC, MQ,
            },
        },
        ring::feature::INDIRECT_DESC,
    },
};

fn rig<'a, R: Registers + Clone>(
    bench: &'a Bench<'a, R>,
    features: u64,
    name: &'static str,
) -> Result<Rig<'a, R>, Miss> {
    if bench.transport.offered_features() & (CTRL_VQ | features) != CTRL_VQ | features {
        return Err(Miss::Lacks(name));
    }
    Rig::new(bench, Setup::with(features))
}

/// Turns promiscuous and all-multicast mode on and off.
pub(super) fn rx_mode<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let mut rig = rig(bench, CTRL_RX, "CTRL_RX")?;
    for command in [command::PROMISCUOUS, command::ALL_MULTICAST] {
        for on in [1, 0] {
            rig.command(command, &[on])?;
        }
    }
    rig.ask(|_| [0; HEADER])?;
    Ok(())
}

/// Sets another MAC address, reads it in the configuration, and restores it; sets the filter table.
pub(super) fn mac<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let features = CTRL_MAC_ADDR | CTRL_RX | MAC;
    let mut rig = rig(bench, features, "CTRL_MAC_ADDR, CTRL_RX and MAC")?;
    let shown = || {
        bench
            .transport
            .device_config(|device| core::array::from_fn::<u8, 6, _>(|at| device.read8(at)))
    };
    let (own, other) = (rig.mac, [0x02, 0x5E, 0x1F, 0x7E, 0x57, 0x01]);
    rig.command(command::MAC_ADDRESS, &other)?;
    must!(
        shown() == other,
        "the configuration shows {:x?} after {other:x?} was set",
        shown()
    );
    rig.command(command::MAC_ADDRESS, &own)?;
    must!(
        shown() == own,
        "the configuration shows {:x?} after {own:x?} was set back",
        shown()
    );
    // One unicast address, no multicast one.
    let table = [&[1, 0, 0, 0][..], &other, &[0; 4]].concat();
    rig.command(command::MAC_TABLE, &table)?;
    rig.command(command::MAC_TABLE, &[0; 8])?;
    rig.ask(|_| [0; HEADER])?;
    Ok(())
}

/// Adds VLANs to the filter, and removes them.
pub(super) fn vlan<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let mut rig = rig(bench, CTRL_VLAN, "CTRL_VLAN")?;
    for vlan in [1_u16, 4094] {
        rig.command(command::VLAN_ADD, &vlan.to_le_bytes())?;
        rig.command(command::VLAN_DELETE, &vlan.to_le_bytes())?;
    }
    Ok(())
}

/// Turns guest-side offloads off and on. One that was not negotiated must be refused.
pub(super) fn offloads<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let features = CTRL_GUEST_OFFLOADS | GUEST_CSUM | GUEST_TSO4 | CSUM;
    let mut rig = rig(
        bench,
        features,
        "CTRL_GUEST_OFFLOADS with GUEST_CSUM and GUEST_TSO4",
    )?;
    for offloads in [0, GUEST_CSUM, GUEST_CSUM | GUEST_TSO4] {
        rig.command(command::GUEST_OFFLOADS, &offloads.to_le_bytes())?;
        rig.ask(|_| [0; HEADER])?;
    }
    let more = rig.command(
        command::GUEST_OFFLOADS,
        &(GUEST_CSUM | GUEST_TSO6).to_le_bytes(),
    );
    must!(
        more.is_err(),
        "an offload was taken that was not negotiated"
    );
    Ok(())
}

/// Sends unknown commands, which must be refused; the queue must still work.
pub(super) fn unknown<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let mut rig = rig(bench, CTRL_RX | INDIRECT_DESC, "CTRL_RX and INDIRECT_DESC")?;
    for command in [(0xEE, 0), (0, 0xEE)] {
        must!(
            rig.command(command, &[0]).is_err(),
            "command {command:?} was acknowledged"
        );
        rig.command(command::PROMISCUOUS, &[0])?;
    }
    Ok(())
}

/// Sets the largest number of pairs, then one. None, and one too many, must be refused.
pub(super) fn queue_pairs<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let mut rig = rig(bench, MQ, "MQ")?;
    let most = bench.transport.device_config(|device| device.read16(8));
    must!(most >= 1, "MQ with {most} pairs");
    for pairs in [0, most + 1] {
        let set = rig.command(command::QUEUE_PAIRS, &pairs.to_le_bytes());
        must!(set.is_err(), "{pairs} pairs were taken, of 1 to {most}");
    }
    rig.command(command::QUEUE_PAIRS, &1_u16.to_le_bytes())?;
    rig.ask(|_| [0; HEADER])?;
    drop(rig);

    // Now with all pairs.
    let vectors = Vectors {
        apic_ids: &alloc::vec![bench.apic_id; usize::from(most)],
        queue: bench.interrupt,
        config: bench.interrupt,
        taken: bench.taken,
    };
    let mut card = Card::bring_up(
        bench.transport,
        bench.config,
        WANTED,
        64,
        vectors,
        bench.own_mac,
    )?;
    let up = card.pairs.len() as u16;
    for pairs in [up, 1, up] {
        card.set_pairs(pairs)?;
    }
    let _running = Running(bench.transport);
    card.pairs
        .iter_mut()
        .try_for_each(|pair| sends(bench, pair))
}

/// Checks that a frame sent on this pair is returned.
fn sends<R: Registers>(bench: &Bench<'_, R>, pair: &mut Pair<R>) -> Check {
    let (index, _) = pair.pair();
    let mac = pair.mac();
    for _ in 0..200 {
        let token = pair
            .transmit(Instant::ZERO)
            .ok_or("no room in a fresh queue")?;
        token.consume(question::BYTES, |frame| {
            frame.copy_from_slice(&question::ask(mac, index.into()))
        });
        pair.flush();
        if bench.wait(20_000_000, || pair.in_flight() == 0) {
            return Ok(());
        }
    }
    Err(alloc::format!("what pair {index} sends is not returned").into())
}
