//! Responses and their bodies.
use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use hyper::{
    Response as HyperResponse, StatusCode,
    body::{Body, Bytes, Frame},
    header::{CONTENT_TYPE, HeaderValue},
};
use serde::Serialize;
use tokio::sync::mpsc;

/// Media type of OpenMetrics, Prometheus' text format.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Media type of pcapng, which has none of its own with IANA.
pub(crate) const PCAPNG: &str = "application/x-pcapng";

/// A response of the API.
pub(crate) type Response = HyperResponse<Content>;

/// Body of a response.
#[derive(Debug)]
pub(crate) enum Content {
    /// All of it; `None` once it was taken.
    Whole(Option<Bytes>),
    /// Parts as they come, until the sender is dropped.
    Parts(mpsc::Receiver<Bytes>),
}

/// A response whose body is JSON.
pub(crate) fn json(
    status: StatusCode,
    media_type: &'static str,
    body: &impl Serialize,
) -> Response {
    // A map with keys that are no texts would be no JSON; there is none.
    let bytes = serde_json::to_vec(body).unwrap_or_default();
    with(status, media_type, Content::Whole(Some(bytes.into())))
}

/// A response without a body.
pub(crate) fn empty(status: StatusCode) -> Response {
    let mut response = HyperResponse::new(Content::Whole(None));
    *response.status_mut() = status;
    response
}

/// A response with a body of this media type.
pub(crate) fn with(status: StatusCode, media_type: &'static str, body: Content) -> Response {
    let mut response = HyperResponse::new(body);
    *response.status_mut() = status;
    let media_type = HeaderValue::from_static(media_type);
    response.headers_mut().insert(CONTENT_TYPE, media_type);
    response
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Parts(parts) => {
                let next = parts.poll_recv(cx);
                next.map(|part| part.map(|part| Ok(Frame::data(part))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole(bytes) => {
                hyper::body::SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64)
            }
            Self::Parts(_) => hyper::body::SizeHint::default(),
        }
    }
}
