use std::{fs::File, os::fd::OwnedFd};

use proptest::prelude::*;
use slipgate_model::{RuleIndex, SlotIndex, VmId, VmRow};
use slipgate_policy::LocalAddresses;

use super::*;
use crate::{
    channel::decode,
    descriptors::{Inbound as _, Outbound as _, Slot},
};

/// The descriptors of a message stand for themselves.
fn tagged(fds: std::ops::Range<i32>) -> Vec<Tag> {
    fds.map(Tag).collect()
}

/// In the place of a descriptor: which one it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Tag(i32);

fn subject() -> impl Strategy<Value = Option<Subject>> {
    prop_oneof![
        Just(None),
        any::<u16>().prop_map(|row| Some(Subject::Vm {
            row: VmRow::new(row)
        })),
        any::<(u32, u32)>().prop_map(|(slot, generation)| {
            let slot = SlotIndex::new(slot);
            Some(Subject::Flow { slot, generation })
        }),
        any::<(u32, u64)>()
            .prop_map(|(run, number)| Some(Subject::Relayed(RelayedId { run, number }))),
    ]
}

fn request() -> impl Strategy<Value = EngineRequest<Tag>> {
    let question = (
        any::<[u8; 4]>(),
        any::<u16>(),
        any::<u8>(),
        any::<Option<String>>(),
    );
    prop_oneof![
        question.prop_map(
            |(address, port, protocol, name)| EngineRequest::Why(FlowQuestion {
                address: address.into(),
                port,
                protocol,
                name,
            })
        ),
        any::<u64>().prop_map(|from| EngineRequest::Inventory { from }),
        any::<u64>().prop_map(|from| EngineRequest::Activity { from }),
        Just(EngineRequest::Thaw),
        Just(EngineRequest::Cut),
        any::<(Option<u64>, Option<u64>)>().prop_map(|(packets, seconds)| {
            EngineRequest::Capture {
                to: Tag(0),
                packets,
                seconds,
            }
        }),
        Just(EngineRequest::Record { to: Tag(0) }),
    ]
}

fn forward(tag: i32) -> ForwardSocket<Tag> {
    ForwardSocket {
        socket: Some(Tag(tag)),
        vm: VmId::new(tag as u32),
        vm_row: VmRow::new(3),
        protocol: 6,
        host: "192.0.2.1:80".parse().unwrap(),
        guest_port: 8_080,
        rule: RuleIndex::new(9),
    }
}

fn start(maps: i32, locks: i32, log: bool, pcap: bool) -> Start<Tag> {
    let files = maps + 1;
    let first_lock = files + i32::from(log) + i32::from(pcap);
    Start {
        maps: tagged(0..maps),
        port: Tag(maps),
        flow_log: log.then_some(Tag(files)),
        pcap: pcap.then_some(Tag(files + i32::from(log))),
        locks: tagged(first_lock..first_lock + locks),
        owner_row: 1,
        epoch: 2,
        userspace: None,
        namespace: None,
        flow_log_events: vec![FlowLogEvent::FlowEnd, FlowLogEvent::Dns],
        vms: Vec::new(),
        policies: Tag(first_lock + locks),
        forward_rules: RuleIndex::new(3),
        forward_texts: vec!["--forward tcp:80:80".into()],
        resolvers: ["192.0.2.53:53", "[2001:db8::53]:53"]
            .map(|resolver| resolver.parse().unwrap())
            .into(),
        nat_ports: (61_000, 65_535),
        eim_ports: Some((50_000, 59_999)),
        reserved_ports: vec![(6, 61_001)],
        network: NetworkView::default(),
        open_questions: vec![OpenQuestion {
            guest: Some("fd00::5".parse().unwrap()),
            vm: VmId::new(1),
            guest_port: 40_000,
            server: [10, 0, 2, 3].into(),
            message: vec![0, 255],
        }],
        log: "info".into(),
    }
}

fn message() -> impl Strategy<Value = ToEngine<Tag>> {
    prop_oneof![
        (0..30, 0..4, any::<bool>(), any::<bool>()).prop_map(|(maps, locks, log, pcap)| {
            ToEngine::Start(Box::new(start(maps, locks, log, pcap)))
        }),
        (0..100).prop_map(|n| ToEngine::Forwards((0..n).map(forward).collect())),
        Just(ToEngine::FlowLog(Tag(0))),
        any::<u64>().prop_map(|id| {
            ToEngine::Policies(Box::new(Policies {
                id,
                policies: Tag(0),
                local: LocalAddresses::default(),
                vms: Vec::new(),
                strictly: vec![VmId::new(1)],
            }))
        }),
        Just(ToEngine::Pcap(Tag(0))),
        Just(ToEngine::Begin),
        Just(ToEngine::Shutdown(OnExit::Keep)),
        any::<u64>().prop_map(|id| ToEngine::Ping { id }),
        (any::<u64>(), subject(), request()).prop_map(|(id, about, request)| ToEngine::Request {
            id,
            about,
            request
        }),
    ]
}

proptest! {
    /// For any message, descriptors taken out return to the same places.
    #[test]
    fn descriptors_come_back_to_their_places(message in message()) {
        let mut taken = Vec::new();
        let wire = message
            .clone()
            .try_map(&mut |tag| {
                taken.push(tag);
                Ok::<_, ()>(Slot)
            })
            .unwrap();
        let json = serde_json::to_vec(&wire).unwrap();
        let wire: ToEngine<Slot> = serde_json::from_slice(&json).unwrap();
        // In the order in which they were numbered, each once.
        prop_assert_eq!(&taken, &tagged(0..taken.len() as i32));
        let mut rest = taken.clone().into_iter();
        let back = wire.clone().try_map(&mut |_| rest.next().ok_or(())).unwrap();
        prop_assert_eq!(back, message);
        prop_assert_eq!(rest.next(), None);
        // With one less there is no message.
        if let Some((_, few)) = taken.split_last() {
            let mut few = few.iter().copied();
            prop_assert!(wire.try_map(&mut |_| few.next().ok_or(())).is_err());
        }
    }

    /// Bytes of another process decode to a message or an error; a message encodes as it was read.
    #[test]
    fn whatever_comes_is_a_message_or_an_error(packet: Vec<u8>) {
        let _ = decode::<ToEngine>(&packet, Vec::new());
        let _ = decode::<FromEngine>(&packet, Vec::new());
    }

    #[test]
    fn replies_are_read_as_they_were_written(id: u64, flows: u64, why: String, kind in 0..4) {
        let reply = match kind {
            0 => EngineReply::Cut { flows },
            1 => EngineReply::Refused { why },
            2 => EngineReply::Inventory(EngineInventory {
                flows: vec![(SlotIndex::new(1), 2, why)],
                next: Some(flows),
                ..EngineInventory::default()
            }),
            _ => EngineReply::Why(WhyAnswer {
                admitted: true,
                rule: why.clone(),
                refusal: Some(why.clone()),
                outcome: why.clone(),
                explanation: why,
                via: None,
                lacks_address: flows % 2 == 0,
            }),
        };
        let message = FromEngine::Reply { id, reply };
        let json = serde_json::to_vec(&message).unwrap();
        let packet = [&[1, 0][..], &json].concat();
        prop_assert_eq!(decode::<FromEngine>(&packet, Vec::new()).unwrap(), message);
    }
}

#[test]
fn a_message_owns_its_descriptors() {
    let null = || OwnedFd::from(File::open("/dev/null").unwrap());
    let mut fds = Vec::new();
    let wire = ToEngine::FlowLog(null()).take_out(&mut fds);
    assert_eq!((&wire, fds.len()), (&ToEngine::FlowLog(Slot), 1));
    let mut fds = fds.into_iter();
    let back = ToEngine::put_back(wire, &mut fds).unwrap();
    assert!(matches!(back, ToEngine::FlowLog(_)));
    assert_eq!(fds.len(), 0);
}
