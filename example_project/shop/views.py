"""The shop's pages."""

import math

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST

from django_distlock import FenceRejected, LockLost, LockNotAcquired, distlock, lock_backends
from django_distlock.models import LockEvent
from django_distlock.views import locked_view
from shop import payments, story
from shop.models import Payment, Product, Report
from shop.reports import report_in_progress
from shop.tasks import capture_payment


def start(request: HttpRequest) -> HttpResponse:
    """Show what there is, which locks are held now, and which writes were refused."""
    refused = LockEvent.objects.filter(kind=LockEvent.Kind.REJECTED)
    return render(
        request,
        "shop/start.html",
        {
            "products": Product.objects.order_by("name"),
            "payments": Payment.objects.order_by("customer"),
            "locks": [lock for backend in lock_backends.all() for lock in backend.list().records],
            "refused": refused.order_by("-at")[:5],
            "can_pause": story.is_possible(),
            "story": story.latest(),
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
    except (LockLost, FenceRejected):
        messages.error(request, "The lease expired. Another process may have captured the payment.")
        return redirect("start")
    except Payment.DoesNotExist:
        raise Http404 from None
    messages.success(
        request, "The payment was captured." if captured else "The payment was already captured."
    )
    return redirect("start")


@require_POST
def capture_later(request: HttpRequest, pk: int) -> HttpResponse:
    """Let a worker capture a payment."""
    payment = get_object_or_404(Payment, pk=pk)
    capture_payment.delay(payment.pk)
    messages.success(request, "A worker captures the payment as soon as its key is free.")
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


def busy(request: HttpRequest, error: Exception) -> HttpResponse:
    """Answer that somebody else is at it, and when to come back at the latest."""
    # A key is free one second after its lease ended, should nobody release it before.
    seconds = 1 + math.ceil(max(0, getattr(error, "expires_in", None) or 0))
    response = render(request, "shop/busy.html", {"error": error, "seconds": seconds}, status=409)
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
    messages.success(request, f"Sold one {product.name}.")
    return redirect("start")
