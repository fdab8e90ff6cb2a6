//! Messages of the broker's in the engine's own types, and back: field by field, for the engine's
//! library and the messages' know nothing of each other.
use std::net::SocketAddr;

use slipgate_abi::{Protocol, VmId, VmRow};
use slipgate_ipc::engine as ipc;
use userspace_nat::{
    control::{self as engine, ControlMessage, NamesPage},
    observe,
    record::{Event, RelayedId},
    relay, route,
    vm::VmSpec,
};

pub(super) fn vm(vm: ipc::VmSpec) -> VmSpec {
    VmSpec {
        id: VmId::new(vm.id),
        row: VmRow::new(vm.row),
        name: vm.name,
        guest: vm.guest,
        gateway: vm.gateway,
        dns: vm.dns,
        prefix_len: vm.prefix_len,
        guest_mac: vm.guest_mac,
        gateway_mac: vm.gateway_mac,
        mtu: vm.mtu,
        max_flows: vm.max_flows,
        new_flows_per_second: vm.new_flows_per_second,
        policy: vm.policy,
        dns_per_second: vm.dns_per_second,
    }
}

pub(super) fn vms(all: Vec<ipc::VmSpec>) -> Vec<VmSpec> {
    all.into_iter().map(vm).collect()
}

pub(super) fn event(event: ipc::FlowLogEvent) -> Event {
    match event {
        ipc::FlowLogEvent::FlowStart => Event::FlowStart,
        ipc::FlowLogEvent::FlowEnd => Event::FlowEnd,
        ipc::FlowLogEvent::Dns => Event::Dns,
        ipc::FlowLogEvent::Refused => Event::Refused,
    }
}

pub(super) fn on_exit(exit: ipc::OnExit) -> engine::OnExit {
    match exit {
        ipc::OnExit::Keep => engine::OnExit::Keep,
        ipc::OnExit::Detach => engine::OnExit::Detach,
    }
}

pub(super) fn subject(subject: ipc::Subject) -> observe::Subject {
    match subject {
        ipc::Subject::Vm { row } => observe::Subject::Vm {
            row: VmRow::new(row),
        },
        ipc::Subject::Flow { slot, generation } => observe::Subject::Flow { slot, generation },
        ipc::Subject::Relayed(ipc::RelayedId { run, number }) => {
            observe::Subject::Relayed(RelayedId { run, number })
        }
    }
}

/// A forward as the kernel translates it, and as it is relayed; `None`: of no such protocol.
pub(super) fn forward(forward: ipc::ForwardSocket) -> Option<(engine::Forward, relay::Forward)> {
    let protocol = Protocol::from_ip(forward.protocol)?;
    let translated = engine::Forward {
        protocol,
        host: *forward.host.ip(),
        host_port: forward.host.port(),
        vm: VmId::new(forward.vm),
        vm_row: VmRow::new(forward.vm_row),
        guest_port: forward.guest_port,
        rule: forward.rule,
    };
    let relayed = relay::Forward {
        vm: VmId::new(forward.vm),
        protocol,
        guest_port: forward.guest_port,
        rule: forward.rule,
        socket: forward.socket,
    };
    Some((translated, relayed))
}

pub(super) fn network(view: ipc::NetworkView) -> ControlMessage {
    let ipc::RouteSnapshot {
        uplink_ifindex,
        addresses,
        routes,
    } = view.routes;
    let addresses = addresses.into_iter().map(|address| route::HostAddress {
        ifindex: address.ifindex,
        addr: address.addr,
        broadcast: address.broadcast,
    });
    let links = view.links.into_iter().map(|link| engine::Link {
        ifindex: link.ifindex,
        mtu: link.mtu,
        has_l2: link.has_l2,
    });
    ControlMessage::Routes {
        routes: route::RouteSnapshot {
            uplink_ifindex,
            addresses: addresses.collect(),
            routes: routes.into_iter().map(route_entry).collect(),
        },
        local: view.local,
        links: links.collect(),
    }
}

fn route_entry(entry: ipc::RouteEntry) -> route::RouteEntry {
    route::RouteEntry {
        prefix: entry.prefix,
        kind: match entry.kind {
            ipc::RouteKind::Unicast => route::RouteKind::Unicast,
            ipc::RouteKind::Local => route::RouteKind::Local,
            ipc::RouteKind::Broadcast => route::RouteKind::Broadcast,
            ipc::RouteKind::Blackhole => route::RouteKind::Blackhole,
            ipc::RouteKind::Unreachable => route::RouteKind::Unreachable,
            ipc::RouteKind::Prohibit => route::RouteKind::Prohibit,
        },
        ifindex: entry.ifindex,
        gateway: entry.gateway,
        prefsrc: entry.prefsrc,
        metric: entry.metric,
        mtu: entry.mtu,
    }
}

pub(super) fn resolvers(all: Vec<std::net::SocketAddrV4>) -> ControlMessage {
    ControlMessage::Resolvers(all.into_iter().map(SocketAddr::V4).collect())
}

pub(super) fn reserved(ports: Vec<(u8, u16)>) -> ControlMessage {
    let known = |(protocol, port)| Some((Protocol::from_ip(protocol)?, port));
    ControlMessage::ReservedPorts(ports.into_iter().filter_map(known).collect())
}

pub(super) fn inventory(page: NamesPage) -> ipc::EngineInventory {
    let vms = page.vms.into_iter().map(|(vm, counts)| {
        let refused_by = counts.refused_by.into_iter();
        let refused_by = refused_by.map(|by| ipc::RefusedQuestions {
            rule: by.rule,
            questions: by.questions,
            last: by.last,
        });
        let counts = ipc::NameCounts {
            refused_names: counts.refused_names,
            refused_types: counts.refused_types,
            refused_chains: counts.refused_chains,
            rebinding: counts.rebinding,
            full: counts.full,
            elsewhere: counts.elsewhere,
            over_rate: counts.over_rate,
            new_names: counts.new_names,
            open: counts.open,
            inspected: counts.inspected,
            refused_by: refused_by.collect(),
        };
        (vm, counts)
    });
    let refused = page.refused.into_iter().map(|sample| ipc::RefusedSample {
        vm: sample.vm,
        reason: sample.reason,
        rule: sample.rule,
        count: sample.count,
        last_ms_ago: sample.last_ms_ago,
        proto: sample.proto,
        guest: sample.guest,
        remote: sample.remote,
    });
    let relayed = page.relayed.into_iter().map(|(vm, counts)| {
        let counts = ipc::RelayedCounts {
            flows: counts.flows,
            begun: counts.begun,
            ended: counts.ended,
            tx_packets: counts.tx_packets,
            tx_bytes: counts.tx_bytes,
            rx_packets: counts.rx_packets,
            rx_bytes: counts.rx_bytes,
        };
        (vm, counts)
    });
    let relayed_flows = page.relayed_flows.into_iter();
    ipc::EngineInventory {
        vms: vms.collect(),
        refused: refused.collect(),
        flows: page.flows,
        relayed: relayed.collect(),
        relayed_flows: relayed_flows.map(live_relayed).collect(),
        next: page.next,
    }
}

fn live_relayed(flow: engine::LiveRelayed) -> ipc::LiveRelayed {
    ipc::LiveRelayed {
        id: ipc::RelayedId {
            run: flow.id.run,
            number: flow.id.number,
        },
        vm: flow.vm,
        protocol: flow.protocol,
        guest: flow.guest,
        remote: flow.remote,
        nat: flow.nat,
        host: flow.host,
        inbound: flow.inbound,
        rule: flow.rule,
        state: flow.state,
        tx: flow.tx,
        rx: flow.rx,
        age_ms: flow.age_ms,
        idle_ms: flow.idle_ms,
    }
}
