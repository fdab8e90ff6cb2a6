use pcap_file::pcapng::{Block, PcapNgReader};
use slipgate_abi::VmId;

use super::*;

const AT: Duration = Duration::new(1_700_000_000, 123_456_789);

fn shot<'a>(vm: VmId, l3: &'a [u8]) -> Shot<'a> {
    Shot {
        vm,
        name: "a",
        link: LinkKind::Guest,
        macs: [[2; 6], [4; 6]],
        ethertype: 0x0800,
        l3,
        inbound: true,
        at: SystemTime::UNIX_EPOCH + AT,
        comment: "miss",
    }
}

fn blocks(bytes: &[u8]) -> Vec<Block<'static>> {
    let mut reader = PcapNgReader::new(bytes).unwrap();
    let mut blocks = Vec::new();
    while let Some(block) = reader.next_block() {
        blocks.push(block.unwrap().into_owned());
    }
    blocks
}

fn packets(bytes: &[u8]) -> Vec<EnhancedPacketBlock<'static>> {
    let all = blocks(bytes).into_iter();
    all.filter_map(|block| match block {
        Block::EnhancedPacket(packet) => Some(packet),
        _ => None,
    })
    .collect()
}

#[test]
fn what_is_added_is_read_back() {
    let mut stream = Stream::new(1 << 20);
    assert!(stream.add(&shot(VmId::new(1), &[0x45; 61])));
    let uplink = Shot {
        link: LinkKind::Uplink,
        inbound: false,
        comment: "",
        ..shot(VmId::new(1), &[0x45; 20])
    };
    assert!(stream.add(&uplink));
    assert!(stream.add(&shot(VmId::new(1), &[0x46; 30])));
    stream.end(SystemTime::now());
    let mut out = Vec::new();
    stream
        .drain(|bytes| {
            // A writer that takes little at a time.
            let n = bytes.len().min(7);
            out.extend_from_slice(&bytes[..n]);
            Ok(n)
        })
        .unwrap();
    assert_eq!((stream.waiting(), stream.counts()), (0, (3, 0)));
    let packets = packets(&out);
    assert_eq!(packets.len(), 3);
    let first = &packets[0];
    assert_eq!(first.timestamp, AT);
    assert_eq!(first.data.len(), 14 + 61);
    assert_eq!(first.original_len, 14 + 61);
    assert_eq!(
        &first.data[..14],
        &[2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 8, 0]
    );
    assert!(first.options.contains(&EnhancedPacketOption::Flags(1)));
    assert!(
        first
            .options
            .contains(&EnhancedPacketOption::Comment("miss".into()))
    );
    assert_eq!(packets[1].options, [EnhancedPacketOption::Flags(2)]);
    let interfaces: Vec<u32> = packets.iter().map(|packet| packet.interface_id).collect();
    assert_eq!(interfaces, [0, 1, 0]);
    let names: Vec<_> = blocks(&out)
        .into_iter()
        .filter_map(|block| match block {
            Block::InterfaceDescription(interface) => Some(interface.options[0].clone()),
            _ => None,
        })
        .collect();
    let named = |name: &'static str| InterfaceDescriptionOption::IfName(name.into());
    assert_eq!(names, [named("a"), named("a uplink")]);
}

#[test]
fn what_finds_no_room_is_lost_and_counted_and_nothing_tears() {
    let mut stream = Stream::new(4_096);
    let mut taken = 0;
    for _ in 0..100 {
        taken += u64::from(stream.add(&shot(VmId::new(1), &[0x45; 400])));
    }
    assert!((4..=8).contains(&taken), "{taken}");
    assert_eq!(stream.counts(), (taken, 100 - taken));
    assert!(stream.waiting() <= 4_096);
    // The writer is full in the middle of a block, then broken, then takes the rest.
    let mut out = Vec::new();
    let mut room = 1_001;
    stream
        .drain(|bytes| {
            let n = bytes.len().min(room);
            if n == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            room -= n;
            out.extend_from_slice(&bytes[..n]);
            Ok(n)
        })
        .unwrap();
    assert!(
        stream
            .drain(|_| Err(io::ErrorKind::StorageFull.into()))
            .is_err()
    );
    assert!(stream.add(&shot(VmId::new(1), &[0x47; 50])));
    let mut all = |bytes: &[u8]| {
        out.extend_from_slice(bytes);
        Ok(bytes.len())
    };
    stream.drain(&mut all).unwrap();
    assert_eq!(packets(&out).len() as u64, taken + 1);
}

#[test]
fn a_link_is_described_once_though_no_packet_comes() {
    let mut stream = Stream::new(1 << 20);
    stream.describe(VmId::new(1), "a", LinkKind::Guest);
    let interfaces = |stream: &mut Stream| {
        let mut out = Vec::new();
        let all = |bytes: &[u8]| {
            out.extend_from_slice(bytes);
            Ok(bytes.len())
        };
        stream.drain(all).unwrap();
        out
    };
    let mut bytes = interfaces(&mut stream);
    assert!(stream.add(&shot(VmId::new(1), &[0x45; 61])));
    stream.end(SystemTime::now());
    bytes.extend(interfaces(&mut stream));
    let is_interface = |block: &&Block<'_>| matches!(block, Block::InterfaceDescription(_));
    let all = blocks(&bytes);
    assert_eq!(all.iter().filter(is_interface).count(), 1, "{all:?}");
    assert!(is_interface(&&all[0]), "before any packet");
    assert_eq!(packets(&bytes)[0].interface_id, 0);
}
