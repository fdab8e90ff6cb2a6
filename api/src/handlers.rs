//! Handlers of requests: each request becomes a message to the broker, or reads figures.
use std::{
    cell::RefCell,
    rc::Rc,
    time::{Duration, Instant},
};

use hyper::{
    Method, StatusCode, Uri,
    body::Bytes,
    header::{ETAG, HeaderValue},
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use slipgate_ipc::{
    api::ApiRequest,
    client::{ClientAnswer, ErrorKind, Target, VmChange, VmStatus},
    engine::{EngineReply, FlowQuestion},
};

use crate::{
    Figures,
    broker::Broker,
    capture,
    events::Events,
    model::{
        CaptureBody, Cut, FlowsQuery, Health, Policy, PolicyPut, Vm, VmBody, VmPatch, Why,
        WhyQuery, merge,
    },
    openapi,
    problem::{Problem, answer, no_vm, other_answer},
    response::{Content, OPENMETRICS, Response, empty, json, with},
    routes::{Action, route},
};

/// How often a VM may be changed by others while it is patched.
const MOST_CHANGED_MEANWHILE: usize = 8;
/// Media type of JSON.
const JSON: &str = "application/json";
/// How long a page of metrics is good for.
const FRESH: Duration = Duration::from_secs(1);

/// State that the handlers share.
pub(crate) struct Daemon {
    pub(crate) broker: Broker,
    pub(crate) events: Rc<Events>,
    pub(crate) figures: Box<dyn Figures>,
    /// Whether clients may change anything.
    pub(crate) may_change: bool,
    /// The page of metrics, and when it was made.
    pub(crate) page: RefCell<Option<(Instant, Bytes)>>,
}

impl Daemon {
    /// The page of metrics. Making one reads every slot, so one is good for [`FRESH`].
    async fn metrics(&self) -> Bytes {
        let made = self.page.borrow().clone();
        if let Some((made, page)) = made
            && made.elapsed() < FRESH
        {
            return page;
        }
        let inventory = self.broker.inventory().await;
        let page = Bytes::from(self.figures.metrics(&inventory));
        *self.page.borrow_mut() = Some((Instant::now(), page.clone()));
        page
    }
}

/// The message to the broker that a change asks for. `None`: the request changes nothing, or needs
/// the VM's present definition first.
///
/// # Errors
/// There is no such request, or its body has another form.
pub fn change_of(
    method: &str,
    path: &str,
    if_match: Option<&str>,
    body: &[u8],
) -> Result<Option<ApiRequest>, Problem> {
    let method = Method::from_bytes(method.as_bytes())
        .map_err(|_| Problem::new(StatusCode::BAD_REQUEST, "that is no method"))?;
    let (found, parameter) = route(&method, path)?;
    let input = Input {
        parameter,
        if_match,
        body,
    };
    request_of(found.action, &input)
}

/// Parts of a request that its meaning depends on.
pub(crate) struct Input<'r> {
    /// Value of the path's parameter.
    pub(crate) parameter: &'r str,
    /// Header If-Match (RFC 9110, section 13.1.1).
    pub(crate) if_match: Option<&'r str>,
    pub(crate) body: &'r [u8],
}

fn request_of(action: Action, input: &Input<'_>) -> Result<Option<ApiRequest>, Problem> {
    let body = input.body;
    let name = || input.parameter.to_owned();
    Ok(Some(match action {
        Action::PutVm => ApiRequest::PutVm {
            vm: Box::new(parsed::<VmBody>(body)?.named(name())),
            replaces: input.if_match.map(generation).transpose()?.flatten(),
        },
        Action::PutPolicy => ApiRequest::PutPolicy {
            name: name(),
            text: text(body)?,
            replaces: input.if_match.map(generation).transpose()?.flatten(),
        },
        Action::RemoveVm => ApiRequest::RemoveVm { name: name() },
        Action::Freeze => ApiRequest::Freeze { vm: name() },
        Action::Thaw => ApiRequest::Thaw { vm: name() },
        Action::CutVm => ApiRequest::Cut {
            what: Target::Vm(name()),
        },
        Action::CutFlow => ApiRequest::Cut {
            what: Target::Flow(name()),
        },
        Action::CaptureVm => capture_of(Target::Vm(name()), body)?,
        Action::CaptureFlow => capture_of(Target::Flow(name()), body)?,
        Action::PatchVm => {
            parsed::<VmPatch>(body)?;
            return Ok(None);
        }
        _ => return Ok(None),
    }))
}

fn capture_of(what: Target, body: &[u8]) -> Result<ApiRequest, Problem> {
    let CaptureBody { packets, seconds } = match body {
        [] => CaptureBody::default(),
        body => parsed(body)?,
    };
    if packets == Some(0) || seconds == Some(0) {
        let detail = "packets and seconds: give 1 at least, or leave them out";
        return Err(Problem::new(StatusCode::BAD_REQUEST, detail));
    }
    Ok(ApiRequest::Capture {
        what,
        packets,
        seconds,
    })
}

/// Carries out a request other than the one for events.
///
/// # Errors
/// It can't be carried out; the problem says why.
pub(crate) async fn carry_out(
    daemon: &Daemon,
    action: Action,
    uri: &Uri,
    input: &Input<'_>,
) -> Result<Response, Problem> {
    let broker = &daemon.broker;
    let (parameter, body) = (input.parameter, input.body);
    let name = || parameter.to_owned();
    if let Some(request) = request_of(action, input)? {
        if matches!(action, Action::CaptureVm | Action::CaptureFlow) {
            return capture::begin(broker, request, parameter).await;
        }
        let answer = answer(broker.ask(request).await?, parameter)?;
        return changed(answer).ok_or_else(other_answer);
    }
    Ok(match action {
        Action::Health => json(StatusCode::OK, JSON, &Health::of(&vms(broker).await?)),
        Action::OpenApi => json(StatusCode::OK, JSON, &openapi::document()),
        Action::ListVms => {
            let vms: Vec<Vm> = vms(broker).await?.into_iter().map(Vm::from).collect();
            json(StatusCode::OK, JSON, &vms)
        }
        Action::GetVm => of_vm(StatusCode::OK, vm(broker, parameter).await?),
        Action::PatchVm => {
            let if_match = input.if_match.map(generation).transpose()?.flatten();
            let answer = patch(broker, parameter, &parsed(body)?, if_match).await?;
            changed(answer).ok_or_else(other_answer)?
        }
        Action::Why => {
            let query: WhyQuery = query(uri)?;
            let question = FlowQuestion {
                address: query.address,
                port: query.port,
                protocol: protocol(query.proto.as_deref())?,
                name: query.name,
            };
            let request = ApiRequest::Why {
                vm: name(),
                question,
            };
            match answer(broker.ask(request).await?, parameter)? {
                ClientAnswer::Engine {
                    reply: EngineReply::Why(why),
                } => json(StatusCode::OK, JSON, &Why::from(why)),
                _ => return Err(other_answer()),
            }
        }
        Action::ListPolicies => json(StatusCode::OK, JSON, &policies(broker).await?),
        Action::GetPolicy => {
            let policies = policies(broker).await?;
            let found = policies.into_iter().find(|policy| policy.name == parameter);
            let found = found.ok_or_else(|| {
                let detail =
                    format!("no policy {parameter:?} was put: GET /v1/policies lists those");
                Problem::new(StatusCode::NOT_FOUND, detail)
            })?;
            let generation = found.generation;
            tagged(json(StatusCode::OK, JSON, &found), generation)
        }
        Action::Flows => {
            let FlowsQuery { vm } = query(uri)?;
            let inventory = broker.inventory().await;
            json(
                StatusCode::OK,
                JSON,
                &daemon.figures.flows(&inventory, vm.as_deref()),
            )
        }
        Action::Stats => {
            let inventory = broker.inventory().await;
            json(StatusCode::OK, JSON, &daemon.figures.stats(&inventory))
        }
        Action::Metrics => {
            let text = daemon.metrics().await;
            with(StatusCode::OK, OPENMETRICS, Content::Whole(Some(text)))
        }
        // Others are changes, and events have a response of their own.
        _ => return Err(other_answer()),
    })
}

async fn vms(broker: &Broker) -> Result<Vec<VmStatus>, Problem> {
    match answer(broker.ask(ApiRequest::ListVms).await?, "")? {
        ClientAnswer::VmList { vms } => Ok(vms),
        _ => Err(other_answer()),
    }
}

async fn policies(broker: &Broker) -> Result<Vec<Policy>, Problem> {
    match answer(broker.ask(ApiRequest::ListPolicies).await?, "")? {
        ClientAnswer::PolicyList { policies } => {
            Ok(policies.into_iter().map(Policy::from).collect())
        }
        _ => Err(other_answer()),
    }
}

async fn vm(broker: &Broker, name: &str) -> Result<VmStatus, Problem> {
    let vms = vms(broker).await?;
    let found = vms.into_iter().find(|vm| vm.definition.name == name);
    found.ok_or_else(|| no_vm(name))
}

/// Changes a VM by a merge patch. Who has changed it between reading and writing it has the better
/// of us, and the patch is applied to what he has made.
async fn patch(
    broker: &Broker,
    name: &str,
    patch: &Value,
    if_match: Option<u64>,
) -> Result<ClientAnswer, Problem> {
    for _ in 0..MOST_CHANGED_MEANWHILE {
        let now = vm(broker, name).await?;
        let mut body = serde_json::to_value(VmBody::from(now.definition)).unwrap_or_default();
        merge(&mut body, patch.clone());
        let body: VmBody = serde_json::from_value(body).map_err(|e| not_as_described(&e))?;
        let request = ApiRequest::PutVm {
            vm: Box::new(body.named(name.to_owned())),
            replaces: if_match.or(Some(now.generation)),
        };
        let given = broker.ask(request).await?;
        let replaced = matches!(
            given,
            ClientAnswer::Error {
                kind: ErrorKind::Replaced,
                ..
            }
        );
        if !replaced || if_match.is_some() {
            return answer(given, name);
        }
    }
    let detail = format!("{name} is changed all the time: try again");
    Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail))
}

/// A VM, with its generation as entity tag.
fn of_vm(status: StatusCode, vm: VmStatus) -> Response {
    let generation = vm.generation;
    tagged(json(status, JSON, &Vm::from(vm)), generation)
}

/// The response to a change that was carried out; `None`: this is no answer to one.
fn changed(answer: ClientAnswer) -> Option<Response> {
    Some(match answer {
        ClientAnswer::Vm { vm, change } => {
            let status = match change {
                VmChange::Created => StatusCode::CREATED,
                VmChange::Changed | VmChange::Unchanged => StatusCode::OK,
            };
            of_vm(status, *vm)
        }
        ClientAnswer::PolicyPut {
            generation,
            cut,
            kept,
        } => {
            let body = PolicyPut {
                generation,
                cut,
                kept,
            };
            tagged(json(StatusCode::OK, JSON, &body), generation)
        }
        ClientAnswer::Done => empty(StatusCode::NO_CONTENT),
        ClientAnswer::Engine {
            reply: EngineReply::Cut { flows },
        } => json(StatusCode::OK, JSON, &Cut { flows }),
        _ => return None,
    })
}

/// A response with the generation of a policy as its entity tag (RFC 9110, section 8.8.3).
fn tagged(mut response: Response, generation: u64) -> Response {
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{generation}\"")) {
        response.headers_mut().insert(ETAG, tag);
    }
    response
}

/// The generation in a header If-Match; `None`: any (`*`).
fn generation(if_match: &str) -> Result<Option<u64>, Problem> {
    let tag = if_match.trim();
    if tag == "*" {
        return Ok(None);
    }
    let number = tag.trim_matches('"').parse();
    number.map(Some).map_err(|_| {
        let detail =
            format!("If-Match {if_match}: give an ETag that a GET or PUT has answered, like \"3\"");
        Problem::new(StatusCode::BAD_REQUEST, detail)
    })
}

fn text(body: &[u8]) -> Result<String, Problem> {
    let text = std::str::from_utf8(body).map(str::to_owned);
    text.map_err(|e| {
        let detail = format!("the body is no text in UTF-8: {e}");
        Problem::new(StatusCode::BAD_REQUEST, detail)
    })
}

fn parsed<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(body).map_err(|e| not_as_described(&e))
}

fn not_as_described(e: &serde_json::Error) -> Problem {
    let detail = format!("the body is not what GET /v1/openapi.json describes: {e}");
    Problem::new(StatusCode::BAD_REQUEST, detail)
}

/// The parameters behind the question mark.
pub(crate) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, Problem> {
    serde_urlencoded::from_str(uri.query().unwrap_or_default()).map_err(|e| {
        let detail = format!("the parameters can't be used: {e}");
        Problem::new(StatusCode::BAD_REQUEST, detail)
    })
}

/// The number of an IP protocol.
fn protocol(name: Option<&str>) -> Result<u8, Problem> {
    match name {
        None | Some("tcp") => Ok(6),
        Some("udp") => Ok(17),
        Some("icmp") => Ok(1),
        Some(other) => Err(Problem::new(
            StatusCode::BAD_REQUEST,
            format!("proto {other:?}: give tcp, udp or icmp"),
        )),
    }
}
