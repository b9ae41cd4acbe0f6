"""The shop's pages."""

import math
from urllib.parse import urlencode

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.views.decorators.http import require_POST

from django_distlock import (
    BackendUnavailable,
    FenceRejected,
    LockLost,
    LockNotAcquired,
    distlock,
    held_keys,
    lock_backends,
)
from django_distlock.inspection import own_key
from django_distlock.models import LockEvent
from django_distlock.views import locked_view
from shop import payments, story
from shop.models import Payment, Product, Report
from shop.reports import report_in_progress
from shop.tasks import capture_payment

#: Held by the worker whose beat leads: each of the shop's workers has one.
LEADER = own_key("celery-beat:shop")


def start(request: HttpRequest) -> HttpResponse:
    """Show what there is, which locks are held now, and which writes were refused."""
    refused = LockEvent.objects.filter(kind=LockEvent.Kind.REJECTED)
    told = story.latest()
    try:
        locks = lock_backends["default"].list().records
    except BackendUnavailable as error:
        messages.error(request, str(error))
        locks = ()
    return render(
        request,
        "shop/start.html",
        {
            "products": Product.objects.order_by("name"),
            "payments": Payment.objects.order_by("customer"),
            "has_open": Payment.objects.filter(status=Payment.Status.OPEN).exists(),
            "locks": locks,
            "refused": refused.order_by("-at")[:5],
            "can_pause": story.is_possible(),
            "story": told,
            "story_in_dashboard": told and in_dashboard(f"payment:{told.pk}"),
            "has_worker": has_worker(),
            "report": Report.objects.order_by("day").last(),
            "report_in_progress": report_in_progress(timezone.localdate()),
        },
    )


@require_POST
def capture(request: HttpRequest, pk: int) -> HttpResponse:
    """Capture a payment, unless somebody is doing so."""
    user = request.user.get_username() or "a visitor"
    try:
        with distlock(f"payment:{pk}", wait=0.5, metadata={"user": user}) as lease:
            captured = payments.capture(pk, lease)
    except LockNotAcquired as error:
        return busy(request, error)
    except BackendUnavailable:
        return redirect("start")  # Which says so.
    except (LockLost, FenceRejected) as error:
        text = "The lease expired. Another process may have captured the payment."
        tell(request, text, error.key, level=messages.ERROR)
        return redirect("start")
    except Payment.DoesNotExist:
        raise Http404 from None
    text = "The payment was captured." if captured else "The payment was already captured."
    tell(request, text, lease.key, fence=lease.fence)
    return redirect("start")


@require_POST
def capture_later(request: HttpRequest, pk: int) -> HttpResponse:
    """Let a worker capture a payment."""
    payment = get_object_or_404(Payment, pk=pk)
    capture_payment.delay(payment.pk)
    text = "A worker captures the payment as soon as its key is free."
    if not has_worker():
        text = "The payment is queued, but no Celery worker runs."
    tell(request, text, f"payment:{pk}")
    return redirect("start")


@require_POST
def pause(request: HttpRequest, pk: int) -> HttpResponse:
    """Let a worker stand still amid the capture of a payment, and see what becomes of it."""
    payment = get_object_or_404(Payment, pk=pk, status=Payment.Status.OPEN)
    if not story.is_possible():
        raise Http404
    if not story.begin(payment.pk):
        messages.error(request, "A worker is already paused. See below what happens to it.")
    return redirect("start")


def has_worker() -> bool:
    """Whether a Celery worker runs; one that was killed counts until its lease ends."""
    return bool(held_keys([LEADER], backend="jobs"))


def in_dashboard(key: str) -> str:
    """Return the address of a key's page in the dashboard."""
    query = urlencode({"backend": "default", "key": key})
    return f"{reverse('admin:django_distlock_heldlock_key')}?{query}"


def tell(
    request: HttpRequest,
    text: str,
    key: str,
    *,
    fence: int | None = None,
    level: int = messages.SUCCESS,
) -> None:
    """Say what just happened, with a link to the key's page in the dashboard."""
    link = key if fence is None else f"{key}, fence {fence}"
    message = format_html('{} <a href="{}">Lock {}</a>', text, in_dashboard(key), link)
    messages.add_message(request, level, message)


def busy(request: HttpRequest, error: Exception) -> HttpResponse:
    """Answer that somebody else is at it, and when to come back at the latest."""
    # A key is free one second after its lease ended, should nobody release it before.
    seconds = 1 + math.ceil(max(0, getattr(error, "expires_in", None) or 0))
    context = {
        "error": error,
        "seconds": seconds,
        "in_dashboard": in_dashboard(getattr(error, "key", "")),
    }
    response = render(request, "shop/busy.html", context, status=409)
    response["Retry-After"] = str(seconds)
    return response


@require_POST
@locked_view("product:{pk}", wait=2, refusal=busy)
async def sell(request: HttpRequest, pk: int) -> HttpResponse:
    """Sell one piece, in the asynchronous way."""
    try:
        product = await Product.objects.aget(pk=pk)
    except Product.DoesNotExist:
        raise Http404 from None
    product.stock -= 1
    await product.asave(update_fields=["stock"])
    tell(request, f"Sold one {product.name}.", f"product:{pk}")
    return redirect("start")
