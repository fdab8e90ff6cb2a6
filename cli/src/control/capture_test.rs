use std::time::SystemTime;

use slipgate_abi::VmId;
use userspace_nat::observe::pcapng::{LinkKind, Shot, Stream};

use super::*;

#[test]
fn blocks_come_out_whole_however_they_are_cut() {
    let mut stream = Stream::new(2_048);
    let shot = Shot {
        vm: VmId::new(1),
        name: "a",
        link: LinkKind::Guest,
        macs: Default::default(),
        ethertype: 0x0800,
        l3: &[0x45; 333],
        inbound: true,
        at: SystemTime::now(),
        comment: "",
    };
    let added = (0..10).filter(|_| stream.add(&shot)).count() as u64;
    stream.end(SystemTime::now());
    let mut all = Vec::new();
    stream
        .drain(|bytes| {
            all.extend_from_slice(bytes);
            Ok(bytes.len())
        })
        .unwrap();
    for step in [1, 7, 100, all.len()] {
        let (mut blocks, mut out) = (Blocks::default(), Vec::new());
        for part in all.chunks(step) {
            out.extend_from_slice(blocks.take(part).unwrap());
            blocks.written();
        }
        assert_eq!(out, all);
        assert_eq!((blocks.packets, blocks.lost), (added, 10 - added));
    }
    let mut blocks = Blocks::default();
    let whole = blocks.take(&all[..all.len() - 1]).unwrap().len();
    assert!(whole < all.len() - 1, "the last block is not whole");
    assert!(Blocks::default().take(&[0xff; 100]).is_err());
}
