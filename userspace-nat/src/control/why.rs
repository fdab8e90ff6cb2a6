//! Explains what would become of a flow: the answer to `slipgate why`. It puts into words the plan
//! that admission would commit.
use std::{net::IpAddr, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{IfIndex, Refusal, VmId, VmRow, vm::VmFlags};
use slipgate_model::{MacMismatch, WhyAnswer};

use crate::{
    admission::plan::{Path, Plan, Planner, has_timestamps_by_default},
    datapath::{Datapath, Tables},
    flow::mappings::Pool,
    route::{Route, ask::Transport},
    state::{Refused, VmState, VmTable},
};
use slipgate_policy::{DNS_PORT, Decision, Destination, Name, wire};

/// Most addresses of a name that are shown: the owner of the name decides how many there are.
const SHOWN_ADDRESSES: usize = 8;

/// Formats the first [`SHOWN_ADDRESSES`] addresses, and the number of the others.
fn some_of(addresses: &[IpAddr]) -> String {
    let (shown, more) = addresses.split_at(addresses.len().min(SHOWN_ADDRESSES));
    let shown: Vec<String> = shown.iter().map(IpAddr::to_string).collect();
    let shown = shown.join(", ");
    match more.len() {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Judges a destination as admission would now, without charging a quota. With a name, judges it as
/// if the guest had resolved that name first.
pub(crate) fn why<D: Datapath>(
    planner: &Planner<'_, D>,
    vms: &VmTable,
    row: VmRow,
    mut to: Destination,
    name: Option<&str>,
) -> WhyAnswer {
    let vm = vms.get(row);
    let mut found = None;
    // Port 53 is answered here, whatever address a name has.
    if let Some(name) = name.filter(|_| to.port != DNS_PORT) {
        match by_name(planner, vm, to, name) {
            Ok((addr, sentence)) => {
                to.addr = addr;
                found = Some(sentence);
            }
            Err(mut answer) => {
                note_state(&planner.nat.datapath, row, &mut answer);
                return *answer;
            }
        }
    }
    let mut answer = by_address(planner, vms, row, to);
    note_state(&planner.nat.datapath, row, &mut answer);
    if let Some(sentence) = found {
        answer.explanation = format!("{sentence}\n{}", answer.explanation);
    }
    answer
}

/// Changes the answer for a frozen VM, of which nothing passes, whatever would be admitted. Adds a
/// sentence for one whose frames come from another MAC than its own.
fn note_state(tables: &impl Tables, row: VmRow, answer: &mut WhyAnswer) {
    let Some(vm) = tables.vm(row) else {
        return;
    };
    if vm.flags().load(Relaxed) & VmFlags::FROZEN != 0 {
        answer.admitted = false;
        answer.outcome = format!("the VM is frozen: nothing passes; else {}", answer.outcome);
    }
    if let Some(mismatch) = MacMismatch::of(&vm.copy()) {
        answer.explanation = format!("{mismatch}\n{}", answer.explanation);
    }
}

/// Returns an address of the name and a sentence that says how it is known.
///
/// # Errors
/// The whole answer, when there is no address to judge.
fn by_name<D>(
    planner: &Planner<'_, D>,
    vm: Option<&VmState>,
    to: Destination,
    name: &str,
) -> Result<(IpAddr, String), Box<WhyAnswer>> {
    let (judge, now_ns) = (planner.rules.judge.borrow(), planner.now_ns);
    let answer = |decision: Decision, refusal: Option<&str>, outcome: String| {
        Box::new(WhyAnswer {
            admitted: decision.is_allowed(),
            rule: judge.policies().text(decision),
            refusal: refusal.map(str::to_owned),
            outcome,
            ..WhyAnswer::default()
        })
    };
    let vm = vm.map_or(VmId::NONE, |vm| vm.net.id);
    let nothing = |outcome| {
        Box::new(WhyAnswer {
            outcome,
            ..WhyAnswer::default()
        })
    };
    let wire = wire(name).map_err(|error| nothing(error.to_string()))?;
    if let Some(text) = judge.policy(vm).without_dns() {
        let outcome = format!("{name} is not resolved: every question is answered REFUSED");
        return Err(Box::new(WhyAnswer {
            rule: text,
            ..*nothing(outcome)
        }));
    }
    let (question, connection, open) = judge.name(vm, Name(&wire), to, now_ns);
    if let Some(refusal) = question.refusal {
        let outcome = format!("{name} is not resolved: the guest's question is answered REFUSED");
        return Err(answer(question, Some(refusal.name()), outcome));
    }
    if let Some(addr) = open.first() {
        let sentence = format!("{name} is open to this VM at {}.", some_of(&open));
        return Ok((*addr, sentence));
    }
    match connection {
        Some(decision) if decision.is_allowed() => {
            let outcome = format!(
                "opened by the answer when the guest asks for {name}, if that leads by names that \
                 are allowed to addresses that are; nothing is open by that name now"
            );
            Err(answer(decision, None, outcome))
        }
        Some(decision) => {
            let outcome = format!("{name} is resolved, but this port is refused by the rules");
            Err(answer(
                decision,
                decision.refusal.map(|r| r.name()),
                outcome,
            ))
        }
        None if to.addr.is_unspecified() => Err(Box::new(WhyAnswer {
            lacks_address: true,
            ..*nothing(format!(
                "no rule names {name}, and this host finds no address for it: ask for an \
                 address"
            ))
        })),
        None => {
            let sentence = format!(
                "{name} is resolved, and no rule by name speaks of this port; this host finds \
                 it at {}.",
                to.addr
            );
            Ok((to.addr, sentence))
        }
    }
}

/// Explains what admission plans for a flow to an address.
fn by_address<D: Datapath>(
    planner: &Planner<'_, D>,
    vms: &VmTable,
    row: VmRow,
    to: Destination,
) -> WhyAnswer {
    let vm = vms.get(row);
    let (judge, now_ns) = (planner.rules.judge.borrow(), planner.now_ns);
    let id = vm.map_or(VmId::NONE, |vm| vm.net.id);
    let nothing = |outcome: String| {
        let decision = judge.decide(id, to, now_ns).decision;
        WhyAnswer {
            rule: judge.policies().text(decision),
            outcome,
            explanation: judge.explain(id, to, now_ns),
            ..WhyAnswer::default()
        }
    };
    let Some(vm) = vm else {
        return nothing(format!("no VM is served in row {row}"));
    };
    if to.port == DNS_PORT
        && let Some((rule, why)) = judge.policy(id).resolves_nothing()
    {
        return WhyAnswer {
            rule,
            explanation: why.to_owned(),
            ..nothing("answered REFUSED, whatever is asked".to_owned())
        };
    }
    if to.port == DNS_PORT {
        let outcome = "answered by slipgate's resolver, whatever address is asked; no rule by \
                       address is tried";
        return WhyAnswer {
            admitted: true,
            rule: String::new(),
            explanation: String::new(),
            ..nothing(outcome.to_owned())
        };
    }
    if let Some(plan) = planner.to_loopback(vm, to) {
        return planned(planner, vms, vm, to, &plan);
    }
    if to.addr.is_ipv6() && vm.net.ipv6.is_none() {
        let outcome = "dropped as ipv6, whatever the rules say: the VM has no IPv6 (`--ipv6`)";
        return nothing(outcome.to_owned());
    }
    if vm.net.is_on_link(to.addr) {
        return nothing("stays on the guest's own network: never translated".to_owned());
    }
    let timestamps = has_timestamps_by_default(to.protocol);
    let plan = planner.outbound(vm, to, timestamps, None);
    planned(planner, vms, vm, to, &plan)
}

/// Puts a plan into words.
fn planned<D>(
    planner: &Planner<'_, D>,
    vms: &VmTable,
    vm: &VmState,
    to: Destination,
    plan: &Plan,
) -> WhyAnswer {
    let judge = planner.rules.judge.borrow();
    let via = match plan.route {
        Some(Route::Via {
            ifindex,
            next_hop,
            source,
            ..
        }) => Some(match vm.net.is_routed_to(to.addr) {
            true => format!("its own address by {next_hop} on ifindex {ifindex}"),
            false => format!("{source} by {next_hop} on ifindex {ifindex}"),
        }),
        _ => None,
    };
    let (rule, explanation) = match &plan.path {
        Path::Relayed(lead) => {
            let explanation = judge.policy(vm.net.id).explain_loopback(to, lead);
            let rule = match plan.decision.refusal {
                Some(_) => judge.policies().text(plan.decision),
                None => lead.text.clone(),
            };
            (rule, explanation)
        }
        Path::Hairpin(_) if vm.net.is_routed_to(to.addr) => {
            let rule = judge.policies().text(plan.decision);
            (rule, judge.explain(vm.net.id, to, planner.now_ns))
        }
        Path::Hairpin(_) => {
            let rule = judge.policies().text(plan.decision);
            let explanation = format!(
                "{} is a translated port of this host, which no safe default protects from a VM with \
                 hairpinning: {rule} decides.",
                to.describe()
            );
            (rule, explanation)
        }
        Path::Translated | Path::Inspected => {
            let rule = judge.policies().text(plan.decision);
            (rule, judge.explain(vm.net.id, to, planner.now_ns))
        }
    };
    let refusal = plan.refused.map(|refused| refused.reason);
    let more = [
        chosen_routes(planner, vm, to, plan),
        next_hops(planner, vm, to, plan),
        paired_with(planner, vm, plan),
        port_behaves(planner, to, plan),
    ];
    let sentences = [Some(explanation)].into_iter().chain(more);
    let explanation = sentences.flatten().collect::<Vec<_>>().join("\n");
    WhyAnswer {
        admitted: refusal.is_none(),
        rule,
        refusal: refusal.map(|refusal| refusal.name().to_owned()),
        outcome: match refusal {
            None => admitted((vms, vm), &plan.path, to),
            Some(refusal) => refused(vm, plan, refusal),
        },
        explanation,
        via,
        lacks_address: false,
    }
}

/// Returns the translated address that the flow has.
fn source_of(plan: &Plan) -> Option<IpAddr> {
    match &plan.path {
        Path::Hairpin(hairpin) => hairpin.external,
        _ => plan.route?.hop().map(|(_, source)| source),
    }
}

/// Says which routes the VM's policy chooses; `None`: none, or no route was looked up.
fn chosen_routes<D>(
    planner: &Planner<'_, D>,
    vm: &VmState,
    to: Destination,
    plan: &Plan,
) -> Option<String> {
    let route = plan.route?;
    let routes = vm.net.routes.as_ref()?;
    let mut said = format!("The routes: those of {routes} (egress).");
    let rule = planner.nat.network.undecided_rule(vm.net.id, to.addr);
    if let Some(priority) = rule
        && !matches!(route, Route::Undecided { .. })
    {
        said += &format!(
            " The kernel was asked about this flow, because the rule {priority} of `ip rule` is by more \
             than mark and addresses."
        );
    }
    Some(said)
}

/// Says which next hops flows to an address are spread over; `None`: there is one, or the flow leaves by
/// no route.
fn next_hops<D>(
    planner: &Planner<'_, D>,
    vm: &VmState,
    to: Destination,
    plan: &Plan,
) -> Option<String> {
    plan.route?.hop()?;
    let mut all = Vec::new();
    let transport = Transport::to(to.protocol, to.port);
    planner
        .nat
        .network
        .route_choosing(vm.net.id, to.addr, transport, &mut |hops| {
            let named = hops.iter().map(|hop| {
                let (ifindex, weight) = (hop.ifindex, hop.share.weight);
                let next_hop = hop.gateway.unwrap_or(to.addr);
                format!("{next_hop} on ifindex {ifindex} (weight {weight})")
            });
            all = named.collect();
            0
        });
    (!all.is_empty()).then(|| {
        format!(
            "The next hop: chosen for each flow by its addresses and ports, of {}.",
            all.join(", ")
        )
    })
}

/// Says which of its pool's addresses the VM has; `None`: it has no pool of that family, or the flow
/// leaves by no route.
fn paired_with<D>(planner: &Planner<'_, D>, vm: &VmState, plan: &Plan) -> Option<String> {
    let nat = source_of(plan)?;
    let pool = planner.nat.network.pairing(vm.net.id)?.pool();
    let all = pool.of_family(nat.is_ipv6()).count();
    pool.contains(nat).then(|| match all {
        1 => format!("The source address: {nat}, the only one of nat_addresses."),
        all => format!(
            "The source address: {nat}, the one of {all} of nat_addresses that this VM is paired \
             with."
        ),
    })
}

/// Says how the flow's translated port behaves toward others, as a STUN client would find out
/// (RFC 5780); `None`: it is not translated, or refused otherwise than for want of a port.
fn port_behaves<D>(planner: &Planner<'_, D>, to: Destination, plan: &Plan) -> Option<String> {
    let lacks_port = |refused: Refused| refused.reason == Refusal::PortsExhausted;
    let has_behaviour = plan.refused.is_none_or(lacks_port);
    let nat = source_of(plan).filter(|_| has_behaviour)?;
    let mappings = &planner.nat.flows.mappings;
    let behaviour = plan.mapped.zip(mappings.range());
    behaviour.map(|(behaviour, range)| {
        let filtering = behaviour.filtering.name();
        let hairpinning = match behaviour.hairpins() {
            true => ", hairpinning",
            false => "",
        };
        let protocol = to.protocol;
        let (taken, all) = (mappings.taken(Pool { protocol, nat }), mappings.size());
        format!(
            "The translated port: endpoint-independent mapping, {filtering} filtering{hairpinning}, \
             from --eim-ports {}-{}, of which {taken} of {all} are taken.",
            range.start(),
            range.end()
        )
    })
}

/// Describes what happens to the packets of an admitted flow.
fn admitted((vms, vm): (&VmTable, &VmState), path: &Path, to: Destination) -> String {
    match path {
        Path::Hairpin(hairpin) if vm.net.is_routed_to(to.addr) => format!(
            "admitted, then led by the engine to VM {}, whose own address it is and whose port is open",
            vms.name_of(hairpin.to)
        ),
        Path::Translated => "admitted, then translated in the kernel".to_owned(),
        Path::Inspected => {
            "admitted, inspected: it must say a name that the rules let in there; then \
                            translated in the kernel"
                .to_owned()
        }
        Path::Hairpin(hairpin) => format!(
            "admitted, then translated in the engine and led back in (hairpin) to VM {}, whose \
             filtering and rules judge the translated address",
            vms.name_of(hairpin.to)
        ),
        Path::Relayed(lead) => format!(
            "admitted, and relayed to the host's {}, if somebody listens there",
            lead.service(to)
        ),
    }
}

/// Describes why a flow is refused.
fn refused(vm: &VmState, plan: &Plan, refusal: Refusal) -> String {
    if plan.decision.refusal.is_some() {
        return "refused by the rules".to_owned();
    }
    match (refusal, plan.route) {
        (Refusal::FlowCap, _) => {
            let cap = vm.net.max_flows;
            format!("refused: the VM has its {cap} flows already")
        }
        (Refusal::FlowRate, _) => {
            let rate = vm.net.new_flows_per_second;
            format!("refused: the VM opens its {rate} flows a second already")
        }
        (Refusal::ByteBudget, _) => "refused: the VM has spent its budget of bytes".to_owned(),
        (Refusal::Inspection, _) => {
            "refused: it can't be inspected, or no more of the VM's flows can".to_owned()
        }
        (Refusal::PortsExhausted, _) if plan.mapped.is_some() => {
            "refused: no port of --eim-ports is left for a port of the VM that has none".to_owned()
        }
        (Refusal::PortsExhausted, _) => {
            "refused: no translated port toward that destination is left".to_owned()
        }
        (Refusal::NoSocket, _) => {
            "refused: the host gives no socket for it: the engine's descriptors are used up, but for \
             those that are kept for other things, or the host is short of descriptors or memory"
                .to_owned()
        }
        (Refusal::NoAddress, _) | (_, Some(Route::NoSource)) => {
            "refused: none of the VM's nat_addresses is an address of this host now".to_owned()
        }
        (Refusal::Protected, None) if matches!(plan.path, Path::Hairpin(_)) => {
            "refused: the host has an address in that guest's prefix, whose open ports are shut until \
             the host has none there"
                .to_owned()
        }
        (Refusal::NoRoute, Some(Route::HostLocal)) => {
            "refused: the VM has no translated address, since no default route leads by its uplink"
                .to_owned()
        }
        (_, Some(Route::HostLocal)) => {
            "an address of the host itself: it has no link to leave by".to_owned()
        }
        (_, Some(Route::OtherUplink { ifindex })) => match vm.net.uplink {
            None => format!("the route leads by ifindex {ifindex}, which is no uplink"),
            Some(IfIndex::NONE) => "the VM's uplink does not exist now".to_owned(),
            Some(uplink) => format!(
                "the route leads by ifindex {ifindex}, not by the VM's uplink (ifindex {uplink}): \
                 give that one a route, for instance a default route with a high metric"
            ),
        },
        (_, Some(Route::Refused(kind))) => format!("the host's route refuses it ({kind:?})"),
        (_, Some(Route::Undecided { priority })) => format!(
            "the rule {priority} of `ip rule` has a condition that slipgate does not check, such as ports or \
             users, and the kernel, which was asked, named no routes that slipgate follows"
        ),
        (_, Some(Route::Unreachable | Route::Via { .. }) | None) => match &vm.net.routes {
            None => "no route leads there".to_owned(),
            Some(routes) => {
                format!("no route of {routes} leads there, or the host has no address to send from")
            }
        },
    }
}
